"""What a study and those beside it have finished: summaries, read again only where their file has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jgesr_lightning.config import to_dict, to_yaml
from jgesr_lightning.files import write_text
from jgesr_lightning.study.cells import Cell, copied, rests_on_files
from jgesr_lightning.summary import FILE, DamagedSummaryError, read_summary


class Summaries:
    """Summaries of finished runs, by folder; a study asks for hundreds of them each time that a cell ends."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, dict[str, Any] | None]] = {}

    def finished(self, folder: Path) -> dict[str, Any] | None:
        """Return what is used of a finished run's summary, None where it has not finished: its seconds, and `copied`.

        Only these are kept: whole summaries of a large study would fill the memory.
        """
        try:
            changed = (folder / FILE).stat().st_mtime_ns
        except OSError:
            return None
        known = self._known.get(folder)
        if known is None or known[0] != changed:
            known = self._known[folder] = (changed, _used(folder))
        return known[1]


def copy_of_equal(cell: Cell, summaries: Summaries) -> Path | None:
    """Copy the cell from a study beside this one that has finished it, or from this one under the cell's former name.

    All settings have to be equal, but for names, what W&B is told, and the choice of devices. Data and code of one's
    own may be others by now: what rests on them is run. A checkpoint stays behind; the copy's files have the cell's own
    settings, and say what they were copied from. Return the folder that was copied, or None without one.
    """
    if cell.folder.exists() or rests_on_files(cell.config):
        return None
    wanted = copied(to_dict(cell.config))
    for path in sorted(cell.folder.parent.parent.glob(f"*/[!.]*/{FILE}")):  # no copy that was broken off
        found = summaries.finished(path.parent)
        if found is not None and found["copied"] == wanted:
            unfinished = cell.folder.with_name(f".{cell.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(path.parent, unfinished, ignore=shutil.ignore_patterns("checkpoint", "wandb*", "figures"))
            _made_own(unfinished, cell, path.parent)
            unfinished.rename(cell.folder)
            return path.parent
    return None


def _made_own(folder: Path, cell: Cell, source: Path) -> None:
    """Give a copy the cell's own settings: a run begun from its config.yaml must not write to where it came from."""
    summary = read_summary(folder)
    own = {"name": cell.name, "config": to_dict(cell.config)}
    whence = {"copied_from": summary.get("copied_from", str(source))}
    write_text(folder / FILE, json.dumps(summary | own | whence, indent=1))
    write_text(folder / "config.yaml", to_yaml(cell.config.replace(resume=None)))


def seconds_of(summary: dict[str, Any]) -> float:
    """Return the seconds that a run's rounds took."""
    found = summary.get("seconds", {})
    total = found.get("total") if isinstance(found, dict) else None
    return float(total) if isinstance(total, (int, float)) else 0.0


def _used(folder: Path) -> dict[str, Any] | None:
    try:
        summary = read_summary(folder)
    except DamagedSummaryError:
        return None
    if summary.get("status") != "finished":
        return None
    return {"seconds": seconds_of(summary), "copied": copied(summary["config"])}

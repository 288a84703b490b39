"""Finds finished runs below folders and in files of stored results, and says which are left out and why."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.identity import digest, flatten
from jgesr_lightning.names import label, word
from jgesr_lightning.reporting.runs import Run, read_summary
from jgesr_lightning.reporting.sources import UNREADABLE, Folder, damage
from jgesr_lightning.reporting.store import stored_runs
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.summary import data_digest

_INNER = ("wandb", "checkpoint", "figures", "media")  # folders inside a run's folder; there, none holds another run


@dataclass(frozen=True)
class Collection:
    """Runs, and what has to be said about them.

    Attributes:
        runs: finished, in the order of their folders' names; one of those with equal settings and seed.
        notes: one line for each run that is left out, with its name and the reason, and for runs that count together.
        order: labels of the methods in the order of the study's file, empty where the runs are no study's.
        names: label -> what the study's file calls that method, where it is not the label itself, nor that of several.
    """

    runs: list[Run]
    notes: list[str]
    order: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def label_of(self, given: str) -> str:
        """Return the label of a method, which may be given as the study's file calls it.

        Raises:
            ConfigError: none of the runs is of that method.
        """
        labels = {run.label: run.label for run in self.runs}
        known = {name: of for of, name in self.names.items() if of in labels} | labels
        if given not in known:
            raise ConfigError(f"no method {shown(given)!r}{nearest(given, known)}; known: {', '.join(sorted(known))}")
        return known[given]


def titles(runs: Iterable[Run], names: Mapping[str, str]) -> dict[str, str]:
    """Return label -> what tables and figures call that method, where it is not the label: what the study's file does.

    A name that says nothing but what the label says, such as ``jgesr_uniform`` of ``jgesr (uniform)``, gives way to it;
    so does one that is another method's label.

    Args:
        runs: those shown.
        names: label -> what the study's file calls the method.
    """
    labels = {run.label for run in runs}
    found = {of: shown(name, 60) for of, name in names.items() if of in labels and not _words(name) <= _words(of)}
    taken = Counter([*labels, *found.values()])  # shortened, two names may be one
    return {of: title for of, title in found.items() if taken[title] == 1}


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.lower()))


def collect(roots: Iterable[str | Path], drawn: str | None = None) -> Collection:
    """Return the finished runs in and below some folders, and in files of stored results.

    Failed, stopped, unfinished and damaged runs are left out by name. Of several runs with the same settings and seed
    the newest counts; where the settings differ by rounding, or methods have one name, all count, together as one seed.

    Args:
        roots: the folders and files.
        drawn: metric whose figures are wanted: the files that they need must be sound too; None: summaries are enough.

    Raises:
        ConfigError: a folder that is not there.
    """
    runs: dict[str, Run] = {}
    notes: list[str] = []
    keys: dict[str, str] = {}
    for found in _found(roots, notes, keys):
        if isinstance(found, Run) and drawn is not None and (harm := damage(found.source, drawn, found.last_round)):
            found = f"{found.name}: {harm}"
        if isinstance(found, str):
            notes.append(f"{shown(found)}; left out")
            continue
        key = found.identity(exact=True)
        former = runs.get(key)
        if former is not None:
            newer, older = (found, former) if _age(found) >= _age(former) else (former, found)
            places = [run.name if older.name != newer.name else shown(run.folder) for run in (older, newer)]
            notes.append(f"{places[0]}: same settings and seed as {places[1]}, which is newer; left out")
            found = newer
        runs[key] = found
    kept = sorted(runs.values(), key=lambda run: str(run.folder))
    times = Counter(keys.values())
    names = {of: key for of, key in keys.items() if key not in keys and times[key] == 1}
    return Collection(kept, notes + _coinciding(kept) + _of_other_data(kept) + _of_other_code(kept), list(keys), names)


def _found(roots: Iterable[str | Path], notes: list[str], keys: dict[str, str]) -> Iterator[Run | str]:
    """Yield every run, or its name and why it cannot be used; add the methods of studies to `keys`, in their order."""
    seen: set[Path] = set()
    for root in map(Path, roots):
        if root.is_file():
            found, methods = stored_runs(root)
            for of, key in methods.items():
                keys.setdefault(of, key)
            yield from found
            continue
        studies: dict[Path, dict[str, list[str]]] = {}  # folder of a study -> name of a method in its file -> labels
        for folder in _run_folders(root, seen, notes):
            if folder.parent not in studies:
                studies[folder.parent] = {name: [] for name in _study_methods(folder.parent)}
            run = _read(folder)
            if isinstance(run, Run):
                labels = studies[folder.parent]
                # the longest: jgesr_uniform is no jgesr; between a method and the seed stand the values of a grid
                name = max((name for name in labels if f"_{word(name)}_" in folder.name), key=len, default=None)
                if name is not None and run.label not in labels[name]:
                    labels[name].append(run.label)  # several where the grid is over a setting of the method
            yield run if isinstance(run, Run) else f"{shown(folder.name)}: {run}"
        for key, held in (item for labels in studies.values() for item in labels.items()):
            name = key if " " in key else label(key)  # of a file's or a module's, the last word
            for of in sorted(held, key=lambda of: of != name):
                keys.setdefault(of, name if len(held) == 1 else of)


def _study_methods(folder: Path) -> list[str]:
    """Return the names that a study's file, of which a copy lies with its runs, gives its methods; else none."""
    try:
        content = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        return [str(key) for key in content["methods"]]
    except (*UNREADABLE, yaml.YAMLError):
        return []


def _coinciding(runs: Sequence[Run]) -> list[str]:
    """Return a line for each run that counts together with another of the same seed, and why it does."""
    first: dict[Hashable, Run] = {}
    lines = []
    for run in runs:
        other = first.setdefault((digest(run.protocol, 32), run.label, run.column, run.seed), run)
        if other is not run:
            what = "settings that differ by rounding only"
            if run.identity() != other.identity():  # such as a class of the same name in another file
                what = f"another method of that name ({shown(run.config['aggregator']['name'])})"
            lines.append(f"{run.name}: same seed as {other.name}, and {what}; their mean counts as that seed's")
    return lines


def _of_other_data(runs: Sequence[Run]) -> list[str]:
    """Return a line for runs that would have had the same samples, had the data not changed between them."""
    first: dict[str, Run] = {}
    lines = []
    for run in runs:
        if not (held := data_digest(run.summary)):
            continue
        other = first.setdefault(digest(run.sharing, 32), run)
        if held != data_digest(other.summary):
            lines.append(f"{run.name}: other samples than {other.name}, of equal settings; the data changed in between")
    return lines


def _of_other_code(runs: Sequence[Run]) -> list[str]:
    """Return a line for runs made with code of somebody's own that was changed between them."""
    first: dict[tuple[str, Any], tuple[Any, Run]] = {}
    lines = []
    for run in runs:
        code = run.summary.get("code")
        if not isinstance(code, dict) or not code:  # most have none, and there may be hundreds
            continue
        settings = flatten(run.config)
        for key, held in code.items():
            known, other = first.setdefault((key, settings.get(key)), (held, run))
            if held != known:
                lines.append(
                    f"{run.name}: {shown(settings[key])} is another than for {other.name}; its file changed in between"
                )
    return lines


def _run_folders(root: Path, seen: set[Path], notes: list[str]) -> Iterator[Path]:
    """Yield the folders of runs, each once, through links too; say in `notes` what cannot be entered."""

    def closed(error: OSError) -> None:
        notes.append(f"{shown(error.filename)}: cannot be read ({shown(error.strerror)}); left out")

    if not root.is_dir():
        beside = [path.name for path in root.parent.glob("*") if path.exists()]
        raise ConfigError(f"no folder and no file {shown(root)}{nearest(root.name, beside)}")
    top = root.resolve()
    for place, folders, files in os.walk(root, followlinks=True, onerror=closed):
        folder, real = Path(place), Path(place).resolve()
        if real in seen or real in top.parents:  # been there; or a link upwards, which would lead back here
            folders.clear()
            continue
        seen.add(real)
        is_run = "summary.json" in files or "config.yaml" in files
        passed_over = _INNER if is_run else ()  # elsewhere a run may well be called so
        folders[:] = sorted(name for name in folders if name not in passed_over and not name.startswith("."))
        notes += [
            f"{shown(name)}: a link to a place that is not there; left out"
            for name in sorted(files)
            if not is_run and os.path.islink(folder / name) and not os.path.exists(folder / name)
        ]
        if is_run:
            yield folder


def _read(folder: Path) -> Run | str:
    """Return the run of a folder, or why it cannot be used."""
    path = folder / "summary.json"
    if not path.is_file():
        return "not finished (no summary.json)"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        return f"summary.json cannot be read ({type(error).__name__}: {error})"
    return read_summary(folder, summary, Folder(folder))


def _age(run: Run) -> float:
    path = run.folder / "summary.json" if isinstance(run.source, Folder) else run.folder.parent  # the stored file's
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

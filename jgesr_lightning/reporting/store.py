"""One small file with all runs of a study: last values of every client, curves, classes, graph; a line a run.

Tables, figures and pages read it as they read the folders it was made from; ``table RUNS --store FILE`` writes it. Last
values and settings are kept exactly; curves, and so means over evaluations, and graphs are rounded to six digits, the
objective's trace to nine.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jgesr_lightning.config import ConfigError
from jgesr_lightning.files import write_bytes
from jgesr_lightning.identity import flatten
from jgesr_lightning.paths import PathError, user_file
from jgesr_lightning.reporting.runs import Run, finished_run
from jgesr_lightning.reporting.sources import UNREADABLE, Array, Held, Source, square
from jgesr_lightning.reporting.text import shown

if TYPE_CHECKING:  # it reads such files
    from jgesr_lightning.reporting.collection import Collection

FORMAT = "jgesr_lightning results"
VERSION = 1
ENDINGS = (".json", ".json.gz")
_DIGITS = 6
_TRACE = 400  # points of an objective's trace


def store(collection: Collection, path: Path) -> None:
    """Write the runs of a collection to a file, compressed where its name ends with ".gz"."""
    runs = collection.runs
    settings = [flatten(run.config) for run in runs]
    common = _common(settings)
    summaries = [_thinned({key: value for key, value in run.summary.items() if key != "config"}) for run in runs]
    shared = _common(summaries)
    rows = [
        _row(run, _without(flat, common), _without(summary, shared))
        for run, flat, summary in zip(runs, settings, summaries, strict=True)
    ]
    head = {"format": FORMAT, "version": VERSION, "methods": collection.order, "names": collection.names}
    head |= {"settings": common, "summary": shared}
    lines = ",\n".join(_line(row) for row in rows)
    text = f'{_line(head)[:-1]},"runs":[\n{lines}\n]}}\n'
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)


def _row(run: Run, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": run.name, "settings": settings, "summary": dict(summary)}
    if curves := run.source.curves():
        row["curves"] = {"round": next(iter(curves.values()))[0]}
        row["curves"] |= {name: [_rounded(value) for value in values] for name, (_, values) in curves.items()}
    if (held := run.source.class_counts()) is not None:
        row["classes"] = {"names": held[0], "counts": held[1].astype(int).tolist()}
    if (kept := run.source.last_graph()) is not None:
        row["graph"] = {"round": kept[0], "weights": [[_rounded(w) for w in line] for line in kept[1].tolist()]}
    return row


def _thinned(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary with at most `_TRACE` points of its objective's trace, and the iterations they stand at."""
    aggregation = summary.get("aggregation")
    trace = aggregation.get("objective") if isinstance(aggregation, Mapping) else None
    if not isinstance(aggregation, Mapping) or not isinstance(trace, list):
        return dict(summary)
    kept: dict[str, Any] = {"objective": [_rounded(value, 9) for value in trace]}
    if len(trace) > _TRACE:  # dense at the start, where most happens; the last point stays
        places = np.unique(np.rint(np.geomspace(1, len(trace), _TRACE)).astype(int) - 1).tolist()
        kept = {"objective": [_rounded(trace[at], 9) for at in places], "objective_at": places}
    return {**summary, "aggregation": {**aggregation, **kept}}


def _common(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all mappings have in common, value and type alike."""
    first = {key: _line(value) for key, value in mappings[0].items()}
    same = [key for key, text in first.items() if all(key in one and _line(one[key]) == text for one in mappings)]
    return {key: mappings[0][key] for key in same}


def _without(mapping: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in common}


def _rounded(value: Any, digits: int = _DIGITS) -> Any:
    if value is None or not np.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.{digits}g}")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class Row(Source):
    """A run's line in a file of stored results.

    Attributes:
        content: the line.
    """

    content: Mapping[str, Any]

    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Return the curves."""
        curves: Mapping[str, Sequence[Any]] = self.content.get("curves", {})
        return curves

    def class_counts(self) -> Held | None:
        """Return class names and (K, classes) counts."""
        held = self.content.get("classes")
        if held is None:
            return None
        return [str(name) for name in held["names"]], np.array(held["counts"], dtype=np.float64)

    def last_graph(self) -> tuple[int, Array] | None:
        """Return the last kept graph and its round."""
        kept = self.content.get("graph")
        if kept is None:
            return None
        return int(kept["round"]), square(np.array(kept["weights"], dtype=np.float64), int(kept["round"]))


def stored_runs(path: Path) -> tuple[list[Run | str], dict[str, str]]:
    """Return the runs of a file (or why one cannot be used, its name first), and its methods in the study's order.

    The methods are label -> what the study's file calls it.

    Raises:
        ConfigError: no such file of ours.
    """
    try:
        content = _content(path)
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, this program reads {VERSION}")
        common, shared, rows = content["settings"], content["summary"], content["runs"]
        if not isinstance(rows, list):
            raise ValueError(f"its runs are {shown(repr(rows), 40)}, no list")
        names = dict(content.get("names", {}))  # files of before have none
        methods = {str(label): str(names.get(label, label)) for label in content["methods"]}
    except UNREADABLE as error:
        raise ConfigError(
            f"{shown(path)} cannot be read as stored results ({shown(error)}); give a folder of runs, or a file that "
            "`table RUNS --store FILE` wrote"
        ) from None
    return [_stored_run(path, place, row, common, shared) for place, row in enumerate(rows)], methods


def store_file(text: str) -> Path:
    """Return the path that a user gave for a file of stored results, new or to replace one.

    Raises:
        PathError: another ending, or something else is there: a study's YAML is lost by one slip of the keyboard.
    """
    path = user_file(text)
    if not path.name.endswith(ENDINGS):
        raise PathError(f"{shown(path)} does not end with {' or '.join(ENDINGS)}, as a file of stored results must")
    if os.path.lexists(path):
        try:
            _content(path)
        except UNREADABLE:
            raise PathError(f"{shown(path)} is there and holds no stored results; name another file") from None
    return path


def _content(path: Path) -> dict[str, Any]:
    """Return what a file of stored results of any version holds; ValueError, or another of UNREADABLE, for others."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is no file that --store wrote")
    return content


def _stored_run(path: Path, place: int, row: Any, common: Mapping[str, Any], shared: Mapping[str, Any]) -> Run | str:
    try:
        name = str(row["name"]).replace("/", "_")
        config: dict[str, Any] = {}
        for key, value in {**common, **row["settings"]}.items():
            *parents, last = key.split(".")
            inner = config
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        summary = {**shared, **row["summary"], "config": config}
    except UNREADABLE as error:
        return f"run {place + 1} of {shown(path.name)}: cannot be read ({type(error).__name__}: {error})"
    return finished_run(path / name, summary, Row(row))

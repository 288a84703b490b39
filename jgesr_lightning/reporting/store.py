"""Writes one small file with all runs of a study: last values of every client, curves, classes, graph; a line a run.

Tables, figures and pages read it as they read the folders it was made from; ``table RUNS --store FILE`` writes it. Last
values and settings are kept exactly; curves, and so means over evaluations, and graphs are rounded to six digits, the
objective's trace to nine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgesr_lightning.files import write_atomically
from jgesr_lightning.identity import flatten
from jgesr_lightning.reporting.collection import Collection
from jgesr_lightning.reporting.runs import Run
from jgesr_lightning.reporting.sources import curve_names
from jgesr_lightning.reporting.stored import FORMAT, VERSION

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
    write_atomically(path, lambda file: file.write(data))


def _row(run: Run, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": run.name, "settings": settings, "summary": dict(summary)}
    curves = {name: history for name in curve_names(run.source) if (history := run.source.history(name)) is not None}
    if curves:
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

"""Finds finished runs below a folder, and says which ones are left out and why."""

from __future__ import annotations

import csv
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jgesr_lightning.config import ConfigError
from jgesr_lightning.identity import CELL, condition, digest, flatten, method_label, protocol, seed_of
from jgesr_lightning.reporting.plots import Array

SCHEMA = 1
_INNER = ("wandb", "checkpoint", "figures", "media")  # folders inside a run's folder; there, none holds another run

# what reading a file raises that is cut short, was overwritten in part or is no such file at all
_UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, EOFError, RuntimeError, MemoryError,
    csv.Error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip

Column = tuple[str, float, float]
"""Data set, noise level, missing rate: a column of a table."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: where its files are.
        summary: the content of ``summary.json``.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        config: dict[str, Any] = self.summary["config"]
        return config

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @cached_property
    def label(self) -> str:
        """The method, with what is not its default."""
        return method_label(self.config["aggregator"])

    @cached_property
    def column(self) -> Column:
        """Data set, noise level and missing rate."""
        flat = flatten(self.config)
        data, noise, missing = (flat[key] for key in CELL)
        return str(data), float(noise), float(missing)

    @property
    def seed(self) -> tuple[Any, ...]:
        """What tells this run from the others of its condition."""
        return seed_of(self.config)

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """The settings that it shares with the other methods of a table."""
        return protocol(self.config)

    def last(self, metric: str) -> float | None:
        """Return a metric of the last round, None where it was not measured."""
        value = self.summary["last"].get(metric)
        return None if value is None or not math.isfinite(value) else float(value)

    def history(self, metric: str) -> tuple[list[int], list[float]] | None:
        """Return rounds and values of a metric from ``metrics.csv``, NaN where empty; None without file or column."""
        path = self.folder / "metrics.csv"
        if not path.is_file():
            return None
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
        if reader.fieldnames is None:
            raise ValueError("the file is empty")
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a row is not as long as the header")
        if not rows or metric not in rows[0]:
            return None
        return [int(row["round"]) for row in rows], [float(row[metric] or "nan") for row in rows]

    def class_counts(self) -> tuple[list[str], Array] | None:
        """Return class names and (K, classes) counts from ``partition.csv``; None where there is no such file."""
        path = self.folder / "partition.csv"
        if not path.is_file():
            return None
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
        if len(lines) < 2:
            raise ValueError("the file has no clients")
        if len({len(line) for line in lines}) > 1:
            raise ValueError("a row is not as long as the header")
        counts = np.array([[float(cell) for cell in line[3:]] for line in lines[1:]])
        if not np.isfinite(counts).all():
            raise ValueError("a count is not a number")
        return lines[0][3:], counts

    def last_graph(self) -> tuple[int, Array] | None:
        """Return the last kept graph and its round; None where there is none."""
        path = self.folder / "graphs.npz"
        if not path.is_file():
            return None
        with np.load(path) as stored:
            kept = sorted(name for name in stored.files if name.startswith("round_"))
            if not kept:
                return None
            number, graph = int(kept[-1].removeprefix("round_")), np.asarray(stored[kept[-1]], dtype=np.float64)
        if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or np.isinf(graph).any():
            raise ValueError(f"the graph of round {number} is not a square matrix of weights")
        return number, graph

    def damage(self, metric: str) -> str | None:
        """Return which of the files that figures are drawn from cannot be read, and why; None where all can."""
        name = "metrics.csv"
        try:
            self.history(metric)
            name = "partition.csv"
            held = self.class_counts()
            name = "graphs.npz"
            kept = self.last_graph()
        except _UNREADABLE as error:
            return f"{name} cannot be read ({type(error).__name__}: {error})"
        if held is not None and kept is not None and len(held[1]) != len(kept[1]):
            return f"partition.csv has {len(held[1])} clients, graphs.npz {len(kept[1])}"
        return None


@dataclass(frozen=True)
class Collection:
    """Runs, and what has to be said about them.

    Attributes:
        runs: finished, one a condition and seed, in the order of their folders' names.
        notes: one line for each run that is left out, with its name and the reason.
    """

    runs: list[Run]
    notes: list[str]


def collect(roots: Iterable[str | Path], drawn: str | None = None) -> Collection:
    """Return the finished runs in and below some folders.

    Failed, stopped, unfinished and damaged runs are left out by name. Of several runs with the same settings and seed
    the newest counts.

    Args:
        roots: the folders.
        drawn: metric whose figures are wanted: the files that they need must be sound too; None: summaries are enough.

    Raises:
        ConfigError: a folder that is not there.
    """
    runs: dict[str, Run] = {}
    notes: list[str] = []
    for folder in _run_folders(roots):
        found = _read(folder)
        if isinstance(found, Run) and drawn is not None:
            found = found.damage(drawn) or found
        if isinstance(found, str):
            notes.append(f"{folder.name}: {found}; left out")
            continue
        key = digest({"condition": condition(found.config), "seed": found.seed}, 32)
        former = runs.get(key)
        if former is not None:
            newer, older = (found, former) if _age(found) >= _age(former) else (former, found)
            notes.append(f"{older.name}: same settings and seed as {newer.name}, which is newer; left out")
            found = newer
        runs[key] = found
    return Collection(sorted(runs.values(), key=lambda run: str(run.folder)), notes)


def _run_folders(roots: Iterable[str | Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for root in roots:
        if not Path(root).is_dir():
            raise ConfigError(f"no folder {root}")
        for place, folders, files in os.walk(root):
            folder, is_run = Path(place), "summary.json" in files or "config.yaml" in files
            passed_over = _INNER if is_run else ()  # elsewhere a run may well be called so
            folders[:] = sorted(name for name in folders if name not in passed_over and not name.startswith("."))
            if is_run and folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _read(folder: Path) -> Run | str:
    """Return the run of a folder, or why it cannot be used."""
    path = folder / "summary.json"
    if not path.is_file():
        return "not finished (no summary.json)"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        status, schema = summary["status"], summary["schema"]
        if schema != SCHEMA:
            return f"summary.json has format {schema}, this program reads {SCHEMA}"
        if status != "finished":
            reason = f" ({summary['reason']})" if summary.get("reason") else ""
            return f"{status}{reason} after round {summary['rounds_done']} of {summary['rounds']}"
        run = Run(folder, summary)
        _ = run.label, run.column, hash(run.seed), run.protocol, condition(run.config)
        _check_numbers(summary)
    except _UNREADABLE as error:
        return f"summary.json cannot be read ({type(error).__name__}: {error})"
    return run


def _check_numbers(summary: dict[str, Any]) -> None:
    """Raise TypeError or OverflowError where tables and figures would meet something else than a number."""
    values = {f"last.{name}": value for name, value in summary["last"].items()}
    values["seconds.total"] = summary.get("seconds", {}).get("total")
    trace = summary.get("aggregation", {}).get("objective")
    if isinstance(trace, list):
        values |= {f"aggregation.objective[{place}]": value for place, value in enumerate(trace)}
    for name, value in values.items():
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, not a number")
        float(value or 0)  # an integer may be too large for one
    if not isinstance(summary["last"]["round"], int):
        raise TypeError(f"last.round is {summary['last']['round']!r}, not a whole number")


def _age(run: Run) -> float:
    return (run.folder / "summary.json").stat().st_mtime


_ORDER = ("local", "fedavg", "fedprox", "cfl", "fedamp", "pfedgraph", "two_step", "jgesr")


def method_rank(label: str) -> tuple[float, str]:
    """Return the sort key that puts methods in the paper's order, each followed by its variants."""
    name = label.partition(" ")[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER) - 2.5, label)


@dataclass(frozen=True)
class Block:
    """Runs that can stand in one table.

    Attributes:
        runs: they differ in method, column and seed only.
        differs: settings in which this block differs from the other ones.
    """

    runs: list[Run]
    differs: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        """The methods, in the order of a table's rows."""
        return sorted({run.label for run in self.runs}, key=method_rank)

    @property
    def columns(self) -> list[Column]:
        """Data sets (MNIST first), noise levels and missing rates."""
        return sorted({run.column for run in self.runs}, key=lambda c: (c[0] != "mnist", *c))

    def cell(self, label: str, column: Column) -> list[Run]:
        """Return the runs of one method in one column, by seed."""
        return sorted((r for r in self.runs if r.label == label and r.column == column), key=lambda r: str(r.seed))


def blocks(runs: Sequence[Run]) -> list[Block]:
    """Split runs into blocks with equal shared settings, the largest first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(digest(run.protocol, 32), []).append(run)
    protocols = [members[0].protocol for members in groups.values()]
    keys = {key for values in protocols for key in values}
    varying = sorted(key for key in keys if len({repr(values.get(key)) for values in protocols}) > 1)
    found = [Block(members, {key: members[0].protocol.get(key) for key in varying}) for members in groups.values()]
    return sorted(found, key=lambda block: -len(block.runs))

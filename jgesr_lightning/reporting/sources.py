"""Where a run's curves, its clients' classes and its graph come from: the files in its folder."""

from __future__ import annotations

import csv
import itertools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jgesr_lightning.checks import is_count

Array = NDArray[np.float64]
Held = tuple[Sequence[str], Array]
"""Names of the classes, and (K, classes) samples of each that each client holds."""
History = tuple[list[int], list[float]]
"""Rounds, and a metric's value after each."""

UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, EOFError, RuntimeError, MemoryError,
    csv.Error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What reading a file raises that is cut short, was overwritten in part or is no such file at all."""

CURVES = ("accuracy/", "loss/")
"""How the metrics begin whose curves are drawn, averaged over evaluations and stored."""


class Source(Protocol):
    """What figures are drawn from, besides the summary; each returns None where the run has no such thing."""

    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Return the "round" of each row, and the values of each metric, empty or None where it was not measured."""

    def class_counts(self) -> Held | None:
        """Return class names and (K, classes) counts."""

    def last_graph(self) -> tuple[int, Array] | None:
        """Return the last kept graph and its round."""

    def history(self, metric: str) -> History | None:
        """Return rounds and values of a metric, NaN where it was not measured."""
        return _history(self.columns(), metric)

    def curves(self) -> dict[str, History]:
        """Return name -> history of the metrics of `CURVES`."""
        columns = self.columns()
        named = {name: _history(columns, name) for name in columns if name.startswith(CURVES)}
        return {name: history for name, history in named.items() if history is not None}


def _history(columns: Mapping[str, Sequence[Any]], metric: str) -> History | None:
    if metric == "round" or not columns.get(metric):
        return None
    rounds = [int(number) for number in columns["round"]]
    values = [float("nan") if value in (None, "") else float(value) for value in columns[metric]]
    if len(rounds) != len(values):
        raise ValueError(f"{metric} has {len(values)} values for {len(rounds)} rounds")
    return rounds, values


@dataclass(frozen=True)
class Folder(Source):
    """The files of a run's folder.

    Attributes:
        path: the folder.
    """

    path: Path

    def columns(self) -> dict[str, list[str]]:
        """Return the columns of ``metrics.csv``; none without the file."""
        path = self.path / "metrics.csv"
        if not path.is_file():
            return {}
        lines = _lines(path)
        if not lines:
            raise ValueError("the file is empty")
        columns = {name: [line[place] for line in lines[1:]] for place, name in enumerate(lines[0])}
        rounds = [int(number) for number in columns["round"]] if len(lines) > 1 else []
        if any(after <= before for before, after in itertools.pairwise(rounds)):
            raise ValueError("its rounds do not ascend")
        return columns

    def class_counts(self) -> Held | None:
        """Return class names and (K, classes) counts from ``partition.csv``."""
        path = self.path / "partition.csv"
        if not path.is_file():
            return None
        lines = _lines(path)
        if len(lines) < 2:
            raise ValueError("the file has no clients")
        counts = np.array([[float(cell) for cell in line[3:]] for line in lines[1:]])
        if not np.isfinite(counts).all():
            raise ValueError("a count is not a number")
        return lines[0][3:], counts

    def last_graph(self) -> tuple[int, Array] | None:
        """Return the last graph in ``graphs.npz`` and its round."""
        path = self.path / "graphs.npz"
        if not path.is_file():
            return None
        if not zipfile.is_zipfile(path):  # NumPy would speak of pickles
            raise ValueError("the file is no archive of arrays")
        with np.load(path) as stored:
            kept = {int(name.removeprefix("round_")): name for name in stored.files if name.startswith("round_")}
            if not kept:
                return None
            number = max(kept)
            graph = np.asarray(stored[kept[number]], dtype=np.float64)
        return number, square(graph, number)


def _lines(path: Path) -> list[list[str]]:
    """Return the lines of a CSV file, its header first."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file, strict=True) if line]
    if len({len(line) for line in lines}) > 1:
        raise ValueError("a row is not as long as the header")
    return lines


def square(graph: Array, number: int) -> Array:
    """Return a graph that is a square matrix of weights; ValueError otherwise."""
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or np.isinf(graph).any():
        raise ValueError(f"the graph of round {number} is not a square matrix of weights")
    return graph


def averaged(metric: str) -> tuple[str, int]:
    """Return the name of a metric, and over how many of the last evaluations it is averaged.

    >>> averaged("accuracy/trained@5"), averaged("accuracy/trained")
    (('accuracy/trained', 5), ('accuracy/trained', 1))
    """
    name, _, count = metric.partition("@")
    return (name, int(count)) if is_count(count) and int(count) > 0 else (metric, 1)


def damage(source: Source, metric: str, last_round: int) -> str | None:
    """Return which of the files that figures are drawn from cannot be read, and why; None where all can."""
    name = "metrics.csv"
    try:
        curves = [*source.curves().values(), source.history(averaged(metric)[0])]
        ends = {curve[0][-1] for curve in curves if curve is not None}
        name = "partition.csv"
        held = source.class_counts()
        name = "graphs.npz"
        kept = source.last_graph()
    except UNREADABLE as error:
        return f"{name} cannot be read ({type(error).__name__}: {error})"
    if ends and max(ends) != last_round:
        return f"metrics.csv ends at round {max(ends)}, the run at round {last_round}"
    if held is not None and kept is not None and len(held[1]) != len(kept[1]):
        return f"partition.csv has {len(held[1])} clients, graphs.npz {len(kept[1])}"
    return None

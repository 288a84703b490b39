"""How far runs lie from the numbers that the paper prints, for each reading of its text and each accuracy.

``python -m jgesr_lightning score RUNS ...``

A reading is what its runs share: the settings that differ between runs of one data set, such as batch size and network.
It is chosen by the numbers of FedAvg and FedProx; those of the other methods are looked at after.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jgesr_lightning.arguments import CommandParser, first_line
from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting.options import add_folders
from jgesr_lightning.reporting.paper import NUMBERS, departures, is_papers
from jgesr_lightning.reporting.render import ABSENT, Cell, Grid, markdown_grid
from jgesr_lightning.reporting.runs import Column, Run, differing
from jgesr_lightning.reporting.tables import PAPERS_METRICS, SETTING_WORDS, seed_means, tables_of
from jgesr_lightning.reporting.text import shown

CHOOSING = ("fedavg", "fedprox")
"""The methods whose numbers a reading is chosen by."""


@dataclass(frozen=True)
class Score:
    """How far one reading's runs lie from some of the paper's numbers, by one accuracy.

    Attributes:
        distance: root mean square of the differences, in percentage points; None without a number.
        numbers: how many of the paper's numbers were compared.
        of: how many there are.
    """

    distance: float | None
    numbers: int
    of: int


def score(means: Mapping[tuple[str, Column], float], methods: Sequence[str]) -> Score:
    """Return the distance of some methods' means, in percent, from the paper's numbers."""
    printed = {key: value for key, value in NUMBERS.items() if key[0] in methods}
    squares = [(means[key] - value) ** 2 for key, value in printed.items() if key in means]
    distance = math.sqrt(sum(squares) / len(squares)) if squares else None
    return Score(distance, len(squares), len(printed))


def means_of(runs: Sequence[Run], metric: str) -> dict[tuple[str, Column], float]:
    """Return (method as published, column) -> mean over seeds of the last round, in percent.

    Of several runs of one seed the mean counts.
    """
    found: dict[tuple[str, Column], list[Run]] = {}
    for run in runs:
        found.setdefault((run.label, run.column), []).append(run)
    by_seed = {key: seed_means(held, metric) for key, held in found.items()}
    return {key: 100 * sum(seeds.values()) / len(seeds) for key, seeds in by_seed.items() if seeds}


def readings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return reading -> its runs: the settings, in words, that differ between runs of one data set."""
    of_data: dict[str, list[Run]] = {}
    for run in runs:
        of_data.setdefault(run.column.data, []).append(run)
    keys = sorted({key for held in of_data.values() for key in differing([run.protocol for run in held])})
    found: dict[str, list[Run]] = {}
    for run in runs:
        words = [f"{SETTING_WORDS.get(key, key)} {run.protocol[key]}" for key in keys if key in run.protocol]
        found.setdefault(shown(", ".join(words) or "all runs"), []).append(run)
    return dict(sorted(found.items()))


def score_grid(runs: Sequence[Run], methods: Sequence[str], caption: str, choose: bool = True) -> Grid:
    """Return a row a reading and a column an accuracy: the distances, the least in bold where they are to choose by.

    No reading is chosen that differs from the paper in what it does print.
    """
    held = readings(runs)
    scores = {name: [score(means_of(of, metric), methods) for metric in PAPERS_METRICS] for name, of in held.items()}
    eligible = [line for name, line in scores.items() if all(is_papers(run.protocol) for run in held[name])]
    full = [one.distance for line in scores.values() for one in line if one.distance is not None]
    most = max((one.numbers for line in eligible for one in line), default=0)
    least = min((one for line in eligible for one in line if one.numbers == most and one.distance is not None),
                key=lambda one: one.distance or 0.0, default=None)  # fmt: skip
    rows = [
        [Cell(name, kind="label"), *(_cell(one, choose and one is least and len(full) > 1) for one in line)]
        for name, line in scores.items()
    ]
    headings = [metric.removeprefix("accuracy/").replace("_", ", ") for metric in PAPERS_METRICS]
    return Grid(caption, [("", headings)], rows, [], "score", corner="reading")


def _cell(one: Score, bold: bool) -> Cell:
    if one.distance is None:
        return Cell(ABSENT)
    return Cell(f"{one.distance:.2f}", bold, count="" if one.numbers == one.of else f"{one.numbers} of {one.of}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the distances of runs from the paper's numbers."""
    parser = CommandParser("score", first_line(__doc__), "score docs/results/readings_small.json")
    add_folders(parser)
    found = tables_of(parser.parse_args(argv).folders, PAPERS_METRICS[0])
    runs = found.collection.runs
    others = tuple(sorted({method for method, _ in NUMBERS} - set(CHOOSING)))
    if not any(score(means_of(runs, metric), (*CHOOSING, *others)).numbers for metric in PAPERS_METRICS):
        raise ConfigError("none of the runs is of a method, data set and noise level that the paper has a number for")
    counts = [sum(method in group for method, _ in NUMBERS) for group in (CHOOSING, others)]
    captions = [
        f"Root mean square distance, in percentage points, from the {counts[0]} numbers that the paper prints for "
        f"{' and '.join(CHOOSING)}, by which a reading is chosen (bold)",
        f"The same from the other {counts[1]} numbers ({', '.join(others)}, as published), which choose nothing",
    ]
    for group, caption in zip((CHOOSING, others), captions, strict=True):
        if any(score(means_of(runs, metric), group).numbers for metric in PAPERS_METRICS):
            grid = score_grid(runs, group, caption, choose=group == CHOOSING)
            print("\n".join(markdown_grid(grid)).strip("\n"), end="\n\n")
    told = [
        f"{name}: not the paper's experiment, and never chosen: {', '.join(departures(other.protocol))}"
        for name, held in readings(runs).items()
        if (other := next((run for run in held if not is_papers(run.protocol)), None))
    ]
    for note in [*told, *found.collection.notes]:
        print(f"note: {note}", file=sys.stderr)
    return 0

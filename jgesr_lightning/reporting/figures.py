"""All figures that a folder of runs supports, as PNG and SVG.

``python -m jgesr_lightning figures runs/ [--metric accuracy/received] [--out DIR]``
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jgesr_lightning.config import ConfigError
from jgesr_lightning.paths import user_path
from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.plots import Series
from jgesr_lightning.reporting.runs import Block, Column, Run, blocks, collect
from jgesr_lightning.reporting.statistics import mean_of
from jgesr_lightning.reporting.table import METRIC, column_title, describe, seed_values

_TRIVIAL = ("local", "fedavg", "fedprox")
"""Methods whose mixing matrix says nothing about the clients."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its name and caption.

    Attributes:
        name: file name without suffix.
        caption: what it shows.
        figure: the figure.
    """

    name: str
    caption: str
    figure: Figure


def draw(runs: Sequence[Run], metric: str = METRIC) -> Iterator[Drawing]:
    """Yield, one at a time, every figure that the runs support.

    Accuracy per round for each data set, noise level and missing rate; accuracy against the missing rate and against
    the noise level, where there are several; the last learned graph beside the clients' classes; the objective against
    the iteration. Names are unique, also where upper and lower case are one; each block of comparable runs after the
    first adds its number.
    """
    taken: set[str] = set()
    for number, block in enumerate(blocks(runs), 1):
        suffix = "" if number == 1 else f"_{number}"
        for drawing in _block(block, metric):
            name = _unused(_file_name(f"{drawing.name}{suffix}"), taken)
            taken.add(name.lower())
            yield Drawing(name, drawing.caption, drawing.figure)


def _block(block: Block, metric: str) -> Iterator[Drawing]:
    for column in block.columns:
        yield from _per_round(block, column, metric)
    yield from _against_missing(block, metric)
    yield from _against_noise(block, metric)
    for column in block.columns:
        yield from _graphs(block, column)
        yield from _objectives(block, column)


def _per_round(block: Block, column: Column, metric: str) -> Iterator[Drawing]:
    series = []
    for label in block.labels:
        histories = [
            curve
            for runs in block.by_seed(label, column).values()
            if (curve := _curve([h for run in runs if (h := run.source.history(metric)) is not None]))
        ]
        if histories:
            series.append(_averaged(label, histories))
    if not any(len(line.x) > 1 for line in series):
        return
    title = column_title(column)
    yield Drawing(
        f"rounds_{title}",
        f"{title}: {describe(metric)}, after each round (0: before training). {_spread(series, 'Bands')}",
        plots.accuracy_per_round(series, _ylabel(metric), title),
    )


def _against_missing(block: Block, metric: str) -> Iterator[Drawing]:
    for data, noise in dict.fromkeys((data, noise) for data, noise, _ in block.columns):
        columns = [column for column in block.columns if column[:2] == (data, noise)]
        series = _against(block, columns, 2, metric)
        title = column_title((data, noise, 0.0))
        if series:
            yield Drawing(
                f"missing_{title}",
                f"{title}: {describe(metric)}, at the last round, against the share of entries that do not arrive. "
                f"{_spread(series, 'Bars')}",
                plots.accuracy_against(series, "missing rate", _ylabel(metric), title),
            )


def _against_noise(block: Block, metric: str) -> Iterator[Drawing]:
    for data, missing in dict.fromkeys((data, missing) for data, _, missing in block.columns):
        columns = [c for c in block.columns if (c[0], c[2]) == (data, missing)]
        if len(columns) < 3:  # two levels are two columns of the table, not a curve
            continue
        series = _against(block, columns, 1, metric)
        title = column_title((data, 0.0, missing)).replace(" s=0", "")
        if series:
            yield Drawing(
                f"noise_{title}",
                f"{title}: {describe(metric)}, at the last round, against the noise level s. {_spread(series, 'Bars')}",
                plots.accuracy_against(
                    series, "noise level s", _ylabel(metric), title, logarithmic=all(c[1] > 0 for c in columns)
                ),
            )


def _against(block: Block, columns: Sequence[Column], axis: int, metric: str) -> list[Series]:
    """Return one line for each method that was measured at two of the columns or more."""
    series = []
    for label in block.labels:
        points: dict[float, list[float]] = {}
        for column in columns:
            values = seed_values(block, label, column, metric)
            if values:
                points[float(column[axis])] = list(values.values())
        if len(points) > 1:
            means = {x: mean_of(values) for x, values in sorted(points.items())}
            several = any(mean.std is not None for mean in means.values())
            stds = [mean.std if mean.std is not None else float("nan") for mean in means.values()]
            series.append(Series(label, list(means), [m.mean for m in means.values()], stds if several else None))
    return series


def _graphs(block: Block, column: Column) -> Iterator[Drawing]:
    for label in block.labels:
        name = label.partition(" ")[0]
        run = next(iter(block.cell(label, column)), None)
        graph = None if run is None or name in _TRIVIAL else run.source.last_graph()
        if run is None or graph is None:
            continue
        held = run.source.class_counts()
        number, weights = graph
        kind = "edge weight" if name in ("jgesr", "two_step") else "mixing weight"
        title = f"{label}, {column_title(column)}, round {number}"
        if held is None:
            figure = plots.graph_heatmap(weights, plots.cluster_order(weights), title, kind)
        else:
            figure = plots.graph_and_labels(weights, held[1], held[0], title=title, label=kind)
        beside = "" if held is None else " Right: the classes of each client's samples, in the same order."
        yield Drawing(
            f"graph_{label}_{column_title(column)}",
            f"{title} (seed {run.config['seed']}): {kind}s between clients, ordered by average-linkage clustering of "
            f"the weights.{beside}",
            figure,
        )


def _objectives(block: Block, column: Column) -> Iterator[Drawing]:
    series = []
    for label in block.labels:
        for run in block.cell(label, column)[:1]:
            trace = run.summary.get("aggregation", {}).get("objective")
            if isinstance(trace, list) and len(trace) > 1:
                values = [float("nan") if value is None else float(value) for value in trace]
                series.append(Series(label, list(range(len(trace))), values))
    if series:
        title = column_title(column)
        yield Drawing(
            f"objective_{title}",
            f"{title}: objective J in the last round's aggregation, less its smallest value, against the iteration.",
            plots.objective_trace(series, title),
        )


def _curve(histories: Sequence[tuple[list[int], list[float]]]) -> dict[int, float]:
    """Return round -> value of one seed: the mean over its runs, where all have the round."""
    curves = [dict(zip(*history, strict=True)) for history in histories]
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {number: sum(curve[number] for curve in curves) / len(curves) for number in sorted(shared)}


def _averaged(label: str, histories: Sequence[dict[int, float]]) -> Series:
    """Return mean and deviation over runs at the rounds that all of them have measured."""
    shared = sorted(set.intersection(*({n for n, v in h.items() if np.isfinite(v)} for h in histories)))
    means = [mean_of([history[number] for history in histories]) for number in shared]
    stds = [mean.std for mean in means if mean.std is not None]
    return Series(label, shared, [mean.mean for mean in means], stds if len(stds) == len(means) > 0 else None)


def _spread(series: Sequence[Series], what: str) -> str:
    return (
        f"{what}: one standard deviation over seeds." if any(line.std is not None for line in series) else "One seed."
    )


def _ylabel(metric: str) -> str:
    which, _, how = metric.removeprefix("accuracy/").partition("_")
    return f"{which} accuracy (%)" if not how else f"{which} accuracy, {how.replace('_', ' ')} (%)"


def _unused(name: str, taken: set[str]) -> str:
    """Return the name, with a number where another picture has it already."""
    found, count = name, 1
    while found.lower() in taken:
        count += 1
        found = f"{name}_{count}"
    return found


def _file_name(text: str) -> str:
    """Return letters, digits, points, dashes and underscores only: the names travel through shells and URLs."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_")


def finished(roots: Sequence[str | Path], metric: str) -> tuple[list[Run], list[str]]:
    """Return the finished runs below some folders whose files can be read, and notes on those left out.

    Raises:
        ConfigError: no folder, no finished run, or a metric that cannot be drawn.
    """
    if not metric.startswith("accuracy/"):
        raise ConfigError(f"--metric is {metric!r}; figures show accuracies, such as {METRIC}")
    collection = collect(roots, metric)
    if not collection.runs:
        why = f" ({'; '.join(collection.notes)})" if collection.notes else ""
        raise ConfigError(f"no finished run in {', '.join(map(str, roots))}{why}")
    return collection.runs, collection.notes


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of the runs below some folders into files."""
    parser = argparse.ArgumentParser(prog="python -m jgesr_lightning figures", description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=user_path, nargs="+", metavar="RUNS", help="folder with runs, at any depth")
    parser.add_argument("--metric", default=METRIC, help=f"an accuracy in the runs' files ({METRIC})")
    parser.add_argument("--out", type=user_path, metavar="DIR", help="folder of the figures (RUNS/figures)")
    arguments = parser.parse_args(argv)
    runs, notes = finished(arguments.folders, arguments.metric)
    target = arguments.out or Path(arguments.folders[0]) / "figures"
    count = 0
    for drawing in draw(runs, arguments.metric):
        for path in plots.save(drawing.figure, target / drawing.name):
            print(path)
        count += 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not count:
        raise ConfigError(f"the runs in {', '.join(arguments.folders)} have no curve, graph or objective to draw")
    return 0

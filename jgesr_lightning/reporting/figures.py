"""All figures that a folder of runs supports, as PNG, SVG and PDF, and what to write below them.

``python -m jgesr_lightning figures runs/ [--metric accuracy/received] [--out DIR]``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial

import numpy as np

from jgesr_lightning.arguments import CommandParser, first_line
from jgesr_lightning.config import ConfigError
from jgesr_lightning.files import write_text
from jgesr_lightning.paths import user_folder
from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.agg import Figure
from jgesr_lightning.reporting.collection import Collection
from jgesr_lightning.reporting.comparisons import Dot, client_plot, dot_plot, forest_plot, go_on
from jgesr_lightning.reporting.map_plot import caption, map_figure
from jgesr_lightning.reporting.maps import Map, map_of
from jgesr_lightning.reporting.network import graph_network, strongest
from jgesr_lightning.reporting.options import add_arguments, beside
from jgesr_lightning.reporting.plots import Looks, Series
from jgesr_lightning.reporting.runs import Block, Column, Run, blocks, method_rank
from jgesr_lightning.reporting.sources import averaged
from jgesr_lightning.reporting.statistics import interval_of, mean_of
from jgesr_lightning.reporting.tables import (
    Findings,
    Table,
    accuracies_only,
    column_title,
    describe,
    mark_text,
    seed_means,
    seeds_text,
    span,
    tables_of,
    told,
    when,
)
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.summary import higher_is_better

_TRIVIAL = ("local", "fedavg", "fedprox")
"""Methods whose mixing matrix says nothing about the clients."""
_LEARNED = ("jgesr", "two_step", "graph_filter")
"""Methods that learn a graph, and mix by what it makes of them."""
_ARROWS = "arrows: the interval goes on"
CAPTIONS = "captions.txt"


@dataclass(frozen=True)
class Drawing:
    """A figure with its name and caption.

    Attributes:
        name: file name without suffix.
        caption: what it shows.
        make: draws it.
        kind: "map", "compare", "clients", "curves" or "graph": the part of a page that it belongs to.
    """

    name: str
    caption: str
    make: Callable[[], Figure]
    kind: str = "curves"

    @cached_property
    def figure(self) -> Figure:
        """The figure, drawn when it is first asked for."""
        return self.make()


def draw(found: Findings) -> Iterator[Drawing]:
    """Yield, one at a time, every figure that the runs support.

    For each data set, noise level and missing rate: means with intervals beside the paper's values, differences to the
    reference, the distribution over clients, accuracy per round, the last learned graph as a matrix beside the clients'
    classes and as a network, and the objective against the iteration. Accuracy against the missing rate and against
    the noise level, where there are several, and the map over kappa and noise. Names are unique, also where upper and
    lower case are one; each block of comparable runs after the first adds its number.
    """
    taken: set[str] = set()
    runs = found.collection.runs
    styles = looks_of(found.collection)
    plane = map_of(runs, found.metric, names=found.collection.names)
    if plane.is_plane:
        yield from unique(map_drawings(plane), 1, taken)
    for number, (block, table) in enumerate(zip(blocks(runs), found.tables, strict=True), 1):
        told = "; with " + ", ".join(f"{key}={value}" for key, value in block.differs.items()) if block.differs else ""
        drawings = (replace(one, caption=one.caption + told) for one in draw_block(block, table, styles))
        yield from unique(drawings, number, taken)


def looks_of(collection: Collection) -> Looks:
    """Return how each method of some runs looks in their figures, by what it is called there."""
    styles = plots.looks(sorted({run.label for run in collection.runs}, key=method_rank))
    called = collection.titles
    return {called.get(label, label): style for label, style in styles.items()}


def unique(drawings: Iterable[Drawing], number: int, taken: set[str]) -> Iterator[Drawing]:
    """Yield the drawings of a block under names that no other picture has; `taken` is added to."""
    suffix = "" if number == 1 else f"_{number}"
    for drawing in drawings:
        name = _unused(_file_name(f"{drawing.name}{suffix}"), taken)
        taken.add(name.lower())
        yield replace(drawing, name=name)


def draw_block(block: Block, table: Table, styles: Looks, compare_only: bool = False) -> Iterator[Drawing]:
    """Yield the figures of one table, all or those that compare methods after the last round.

    Args:
        block: the runs.
        table: theirs.
        styles: `looks_of` all runs that are drawn, of other blocks too.
        compare_only: only those that compare methods after the last round.
    """
    for column in block.columns:
        yield from _means(table, column, styles)
    for column in block.columns:
        yield from _differences(table, column, styles)
    if compare_only:
        return
    for column in block.columns:
        yield from _clients(block, table, column, styles)
    for column in block.columns:
        yield from _per_round(block, table, column, styles)
    for axis in ("missing", "noise"):
        yield from _against_setting(block, table, axis, styles)
    for column in block.columns:
        yield from _graphs(block, table, column)
        yield from _objectives(block, table, column, styles)


def map_drawings(found: Map, separately: bool = False) -> Iterator[Drawing]:
    """Yield the picture of a map with all panels in one, or one picture a panel, of which the first says what it is."""
    if not separately:
        yield Drawing("map", caption(found, found.panels), partial(map_figure, found), "map")
        return
    for place, panel in enumerate(found.panels):
        told = f"{panel.title}, in the same way." if place else caption(found, [panel])
        yield Drawing(f"map_{panel.title}", told, partial(map_figure, found, [panel]), "map")


def _means(table: Table, column: Column, styles: Looks) -> Iterator[Drawing]:
    found = {label: entry for label in table.rows if (entry := table.entries.get((label, column))) is not None}
    if len(found) < 2:
        return
    dots = [
        Dot(table.title(label), entry.value.mean, interval_of(entry.value), entry.paper, mark=mark_text(entry.marks))
        for label, entry in found.items()
    ]
    title = column_title(column)
    over, one = _over(entry.value.n for entry in found.values())
    bars = f"; bars: 95 % confidence intervals of it (Student's t), cut at 0 and 100 %{one}" if over else ""
    bars += f"; {_ARROWS}" if go_on(dots, percent=True) else ""
    paper = f"; diamonds: the paper's value{table.paper_heading.removeprefix('paper')}"
    paper = paper if any(dot.paper is not None for dot in dots) else ""
    yield Drawing(
        f"means_{title}",
        f"{title}: {describe(table.metric)}, {when(table.metric)}, {over or 'one seed'}{bars}{paper}.",
        partial(dot_plot, dots, styles, _ylabel(table.metric), title),
        "compare",
    )


def _differences(table: Table, column: Column, styles: Looks) -> Iterator[Drawing]:
    pairs = {
        table.title(label): entry.pair
        for label in table.rows
        if (entry := table.entries.get((label, column))) is not None and entry.pair is not None
    }
    dots = [Dot(label, one.mean, one.half_width, None, one.holm_half_width) for label, one in pairs.items()]
    if not any(dot.half_width is not None for dot in dots):
        return
    reference = table.reference_title
    title = f"{column_title(column)}: minus {reference}"
    arrows = f"; {_ARROWS}" if go_on(dots, percent=False) else ""
    better = "right" if higher_is_better(table.metric) else "left"
    yield Drawing(
        f"differences_{column_title(column)}",
        f"{column_title(column)}: each method minus {reference} on equal seeds; {better} of zero is better than "
        f"{reference}. Thick: 95 % interval by itself; thin: corrected for the number of differences in the table "
        f"(Holm){arrows}.",
        partial(forest_plot, dots, styles, "percentage points", title),
        "compare",
    )


def client_names(run: Run) -> dict[int, str]:
    """Return number -> name of clients that have names of their own."""
    told = run.summary.get("data")
    names = told.get("clients") if isinstance(told, Mapping) else None
    return {number: shown(name, 30) for number, name in enumerate(names)} if isinstance(names, list) else {}


def _clients(block: Block, table: Table, column: Column, styles: Looks) -> Iterator[Drawing]:
    base = averaged(table.metric)[0].partition("_")[0]
    rows = []
    for label in table.rows:
        points = []
        for run in block.cell(label, column):
            held = run.summary.get("clients", {}).get(base)
            known = client_names(run)
            for client, value in enumerate(held if isinstance(held, list) else []):
                if value is not None:
                    name = f"{known.get(client, f'client {client}')}, seed {run.config['seed']}"
                    points.append((100 * float(value), name))
        if points:
            worst, whose = min(points, key=lambda point: point[0])
            values = np.array([value for value, _ in points])
            rows.append((table.title(label), values, shown(f"{whose}: {worst:.0f} %")))
    if rows:
        title = column_title(column)
        yield Drawing(
            f"clients_{title}",
            f"{title}: {describe(base).partition(', ')[0]}, after the last round: a point a client and seed; "
            "the stroke is their mean, and the worst is named.",
            partial(client_plot, rows, styles, _ylabel(base), title),
            "clients",
        )


def _per_round(block: Block, table: Table, column: Column, styles: Looks) -> Iterator[Drawing]:
    metric, series, counts = averaged(table.metric)[0], [], []
    for label in block.labels:
        histories = [
            curve
            for runs in block.by_seed(label, column).values()
            if (curve := _curve([h for run in runs if (h := run.source.history(metric)) is not None]))
        ]
        if histories:
            series.append(_averaged(table.title(label), histories))
            counts.append(len(histories))
    if not any(len(line.x) > 1 for line in series):
        return
    title = column_title(column)
    yield Drawing(
        f"rounds_{title}",
        f"{title}: {describe(metric)}, after each round{_from(series)}. {_spread(counts)}",
        partial(plots.accuracy_per_round, series, styles, _ylabel(metric), title),
    )


def _against_setting(block: Block, table: Table, axis: str, styles: Looks) -> Iterator[Drawing]:
    """Yield accuracies against an item of a column, "noise" or "missing", a figure for each pair of the other two."""
    sheets: dict[Column, list[Column]] = {}
    for column in block.columns:
        rest = column._replace(noise=0.0) if axis == "noise" else column._replace(missing=0.0)
        sheets.setdefault(rest, []).append(column)
    for rest, columns in sheets.items():
        series = _lines_against(block, table, columns, axis)
        if not series or (axis == "noise" and len(columns) < 3):  # two levels are two columns of the table, not a curve
            continue
        title, what, xlabel = column_title(rest), "share of entries that do not arrive", "missing rate"
        if axis == "noise":
            title, what, xlabel = title.replace(" s=0", ""), "noise level s", "noise level s"
        yield Drawing(
            f"{axis}_{title}",
            f"{title}: {describe(table.metric)}, {when(table.metric)}, against the {what}. "
            f"{_spread(entry.value.n for (_, column), entry in table.entries.items() if column in columns)}",
            partial(
                plots.accuracy_against,
                series,
                styles,
                xlabel,
                _ylabel(table.metric),
                title,
                logarithmic=axis == "noise" and all(column.noise > 0 for column in columns),
            ),
        )


def _lines_against(block: Block, table: Table, columns: Sequence[Column], axis: str) -> list[Series]:
    """Return one line for each method that was measured at two of the columns or more."""
    series = []
    for label in block.labels:
        points = {
            getattr(column, axis): list(values.values())
            for column in columns
            if (values := seed_means(block.cell(label, column), table.metric))
        }
        if len(points) > 1:
            means = {x: mean_of(values) for x, values in sorted(points.items())}
            several = any(mean.std is not None for mean in means.values())
            stds = [mean.std if mean.std is not None else float("nan") for mean in means.values()]
            series.append(
                Series(table.title(label), list(means), [m.mean for m in means.values()], stds if several else None)
            )
    return series


def _graphs(block: Block, table: Table, column: Column) -> Iterator[Drawing]:
    for label in reversed(block.labels):  # the proposed method first
        name = label.partition(" ")[0]
        run = next(iter(block.cell(label, column)), None)
        graph = None if run is None or name in _TRIVIAL else run.source.last_graph()
        if run is None or graph is None:
            continue
        held = run.source.class_counts()
        number, weights = graph
        kind = "edge weight" if name in _LEARNED else "mixing weight"
        title = f"{table.title(label)}, {column_title(column)}, round {number}"
        around = plots.cluster_order(weights)
        drawn, total, _ = strongest(weights)
        edges = (
            f"the {len(drawn)} strongest of {total} edges are drawn" if len(drawn) < total else "all edges are drawn"
        )
        beside = "" if held is None else " Right: the classes of each client's samples, in the same order."
        yield Drawing(
            f"graph_{label}_{column_title(column)}",
            f"{title} (seed {run.config['seed']}): {kind}s between clients, ordered by average-linkage clustering of "
            f"the weights.{beside}",
            partial(plots.graph_heatmap, weights, around, title, kind, held),
            "graph",
        )
        yield Drawing(
            f"network_{label}_{column_title(column)}",
            f"{title} (seed {run.config['seed']}): clients on a circle in the order of the matrix; an edge is as broad "
            f"as its weight, {edges}" + ("." if held is None else "; a node shows its classes."),
            partial(graph_network, weights, around, title, held),
            "graph",
        )


def _objectives(block: Block, table: Table, column: Column, styles: Looks) -> Iterator[Drawing]:
    series, seeds = [], {}
    for label in block.labels:
        for run in block.cell(label, column)[:1]:
            trace = run.summary.get("aggregation", {}).get("objective")
            if isinstance(trace, list) and len(trace) > 1:
                values = [float("nan") if value is None else float(value) for value in trace]
                at = run.summary["aggregation"].get("objective_at") or range(len(trace))
                series.append(Series(table.title(label), list(at), values))
                seeds[table.title(label)] = f"seed {shown(run.config['seed'])}"
    if series:
        title = column_title(column)
        alike = len(set(seeds.values())) == 1
        which = next(iter(seeds.values())) if alike else ", ".join(f"{label}: {seed}" for label, seed in seeds.items())
        yield Drawing(
            f"objective_{title}",
            f"{title}: objective J in the last round's aggregation of one run a method ({which}), less its smallest "
            "value, against the iteration.",
            partial(plots.objective_trace, series, styles, title),
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


def _from(series: Sequence[Series]) -> str:
    """Return where the curves begin, in words, unless it is with the first round."""
    first = min(line.x[0] for line in series if len(line.x))
    return " (0: before training)" if first == 0 else f" measured, from round {first} on" if first > 1 else ""


def _spread(counts: Iterable[int]) -> str:
    """Return what lines and bands are."""
    over, one = _over(counts)
    bands = f"bands: one sample standard deviation to either side, cut at 0 and 100 %{one}"
    return f"Lines: {over}; {bands}." if over else "One seed."


def _over(counts: Iterable[int]) -> tuple[str, str]:
    """Return over how many seeds means are, empty where each is of one; and what is said of those that are."""
    found = sorted(set(counts))
    if found[-1] == 1:
        return "", ""
    seeds = seeds_text(found[0]) if len(found) == 1 else f"{span(found)} seeds"
    return f"mean over {seeds}", "; of one seed there is none" if found[0] == 1 else ""


def _ylabel(metric: str) -> str:
    name, count = averaged(metric)
    which, _, how = name.removeprefix("accuracy/").partition("_")
    over = f", mean of the last {count}" if count > 1 else ""
    return f"{which} accuracy{over} (%)" if not how else f"{which} accuracy, {how.replace('_', ' ')}{over} (%)"


def _unused(name: str, taken: set[str]) -> str:
    """Return the name, with a number where another picture has it already."""
    found, count = name, 1
    while found.lower() in taken:
        count += 1
        found = f"{name}_{count}"
    return found


def _file_name(text: str) -> str:
    """Return letters, digits, points, dashes and underscores only: the names travel through shells and URLs.

    File systems take 255 characters at most, and a method with many settings has a long label.
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_")[:150]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of the runs below some folders into files."""
    parser = CommandParser("figures", first_line(__doc__), "figures runs/table1_small --out figures")
    add_arguments(parser)
    parser.add_argument("--out", type=user_folder, metavar="DIR", help="folder of the figures (RUNS/figures)")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="figures whose name matches, such as 'rounds_*'"
    )
    arguments = parser.parse_args(argv)
    found = tables_of(arguments.folders, arguments.metric, arguments.reference, drawn=True)
    accuracies_only(found.metric)
    target = arguments.out or beside(arguments.folders, "figures")
    captions, matched = [], 0
    for drawing in draw(found):
        captions.append(f"{drawing.name}\n{drawing.caption}\n")
        if not any(fnmatchcase(drawing.name, pattern) for pattern in arguments.only or ["*"]):
            continue
        matched += 1
        for path in plots.save(drawing.figure, target / drawing.name):
            print(path)
    for note in found.collection.notes:
        print(f"note: {note}", file=sys.stderr)
    if not captions:
        raise ConfigError(f"the runs in {', '.join(map(shown, arguments.folders))} have nothing to draw")
    if not matched:
        raise ConfigError(
            f"--only {' '.join(arguments.only)} matches none of the {len(captions)} figures, such as {drawing.name}"
        )
    if called := found.collection.titles:
        captions.append(f"Called as in the study's file: {told(called)}.\n")
    write_text(target / CAPTIONS, "\n".join(captions))  # of all: those of figures drawn before stay
    print(target / CAPTIONS)
    return 0

"""The map of a study: which method leads where, by how much over staying alone and averaging all, and who is reliable.

``python -m jgesr_lightning map RUNS ... [--rows data.kappa] [--columns channel.noise] [--metric M] [--out DIR]``

Its tables, how every method stands over all of it, and every cell, are written as Markdown, LaTeX and CSV.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence

from jgesr_lightning.arguments import CommandParser, first_line
from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.files import write_text
from jgesr_lightning.identity import SEEDS
from jgesr_lightning.paths import user_folder
from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.figures import map_drawings
from jgesr_lightning.reporting.map_plot import STARS, stars
from jgesr_lightning.reporting.maps import BASELINES, COLUMNS, GAIN, ROWS, TOLERANCE, Map, Panel, Spot, map_of, text
from jgesr_lightning.reporting.options import add_places
from jgesr_lightning.reporting.render import (
    ABSENT,
    PREAMBLE,
    Cell,
    Grid,
    ends,
    exact,
    interval_text,
    latex_grid,
    markdown_grid,
)
from jgesr_lightning.reporting.runs import Run, differing
from jgesr_lightning.reporting.statistics import Difference
from jgesr_lightning.reporting.tables import METRIC, accuracies_only, in_words, tables_of, when
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.summary import higher_is_better

FEWER = "(n): on n seeds only, fewer than a baseline has there"


def standings_grid(found: Map) -> Grid:
    """Return a row a method: its worst loss against the better baseline, its best gain over both, and where."""
    rows, standings = [], found.standings()
    for one in standings:
        worst, best = (_extreme(held, one.reliable) for held, _ in (one.worst, one.best))
        places = [Cell(where, kind="words") for _, where in (one.worst, one.best)]
        counts = [Cell(str(count)) for count in (one.leads, one.gains, one.losses, one.spots)]
        name = found.name(one.label)
        told = one.label if name == one.label else f"{name}: {one.label}"
        rows.append([Cell(told, kind="label"), worst, places[0], best, places[1], *counts])
    headings = ["worst", "there", "best", "there", "leads", "clearly above", "clearly below", "cells"]
    caption = (
        f"{in_words(found.metric)}, {when(found.metric)}: each method minus {found.both} of a cell, "
        "by its mean there, on equal seeds, in percentage points: the least and the greatest over the map, with 95 % "
        "intervals (Student's t)"
    )
    notes = [
        f"bold: run in every cell, nowhere more than {TOLERANCE:g} below {found.both}, and somewhere more than "
        f"{GAIN:g} above it",
        "clearly: the interval corrected for the number of methods in a cell (Holm) leaves out zero",
    ]
    if any(map(_has_fewer, found.panels)):
        notes.append(f"{FEWER}, and not counted as run")
    if left := found.count - max((one.spots for one in standings), default=0):
        needed = " or ".join(map(found.name, found.baselines))
        notes.append(f"{left} of {found.count} cells lack {needed} and do not count: name others by --baseline METHOD")
    return Grid(caption, [("", headings)], rows, notes, "standings")


def panel_grid(found: Map, panel: Panel) -> Grid:
    """Return a row a cell of a panel: the better baseline, and every method minus it."""
    labels = [label for label in found.labels if any(label in spot.means for spot in panel.spots.values())]
    rows = []
    for at in ((row, column) for row in panel.rows for column in panel.columns):
        spot = panel.spots.get(at)
        line = [Cell(found.here(at), kind="label")]
        if spot is None:
            rows.append([*line, *[Cell(ABSENT)] * (len(labels) + 1)])
            continue
        better = ABSENT if spot.base is None else f"{found.name(spot.base)} {spot.means[spot.base].mean:.2f}"
        rows.append([*line, Cell(better, kind="words"), *(_against(spot, label) for label in labels)])
    what = f"{found.both} in percent, and each method minus it in percentage points"
    caption = f"{panel.title}: {what}; {STARS}; bold: leads{f'; {FEWER}' if _has_fewer(panel) else ''}"
    heading = "better of both" if len(found.baselines) == 2 else found.both
    return Grid(caption, [("", [heading, *map(found.name, labels)])], rows, [], "map", corner="cell")


def grids(found: Map) -> list[Grid]:
    """Return all grids of a map."""
    return [standings_grid(found), *(panel_grid(found, panel) for panel in found.panels)]


def markdown(found: Map) -> str:
    """Return all grids as Markdown."""
    return "\n".join(line for grid in grids(found) for line in markdown_grid(grid)).strip("\n") + "\n"


def latex(found: Map) -> str:
    """Return all grids as LaTeX."""
    lines = [line for number, grid in enumerate(grids(found)) for line in latex_grid(grid, number)]
    return "\n".join([PREAMBLE, *lines])


def csv_text(found: Map) -> str:
    """Return the map in long form: a row a method and cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["panel", "metric", found.rows, found.columns, "method", "seeds", "mean", "std", "leads", "better_baseline",
         "method_minus_better", "ci95_low", "ci95_high", "holm_low", "holm_high", "p", "paired_seeds"]
    )  # fmt: skip
    for panel in found.panels:
        for at, spot in panel.spots.items():
            for label, mean in spot.means.items():
                one = spot.against.get(label)
                numbers: list[float | None] = [None] * 6
                if one is not None:
                    numbers = [one.mean, *ends(one, one.half_width), *ends(one, one.holm_half_width), one.p]
                writer.writerow(
                    [panel.title, found.metric, *map(text, at), label, mean.n, *map(exact, (mean.mean, mean.std)),
                     int(label in spot.leaders), spot.base or "", *map(exact, numbers),
                     "" if one is None else one.n]
                )  # fmt: skip
    return out.getvalue()


def _has_fewer(panel: Panel) -> bool:
    return any(spot.fewer(label) for spot in panel.spots.values() for label in spot.means)


def _against(spot: Spot, label: str) -> Cell:
    one = spot.minus_base(label)
    if one is None:
        return Cell(ABSENT)
    number = "0" if label == spot.base else f"{one.mean:+.2f}"
    return Cell(number + spot.fewer(label), label in spot.leaders, stars(one))


def _extreme(one: Difference, bold: bool) -> Cell:
    """Return a difference with its interval; that of a baseline to itself is nothing."""
    number = f"{one.mean:+.2f}" if one.mean else "0"
    return Cell(f"{number} {interval_text(one.mean, one.half_width)}".rstrip(), bold, stars(one))


WRITERS: Mapping[str, tuple[str, Callable[[Map], str]]] = {
    "md": ("map.md", markdown),
    "csv": ("map.csv", csv_text),
    "latex": ("map.tex", latex),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a map; write them and the picture into a folder where asked."""
    parser = CommandParser("map", first_line(__doc__), "map runs/map_small --out map")
    add_places(parser)
    parser.add_argument("--rows", default=ROWS, metavar="KEY", help=f"setting that makes the rows ({ROWS})")
    parser.add_argument("--columns", default=COLUMNS, metavar="KEY", help=f"that which makes the columns ({COLUMNS})")
    parser.add_argument("--format", choices=[*WRITERS, "all"], default="md", help="what is printed, or written (md)")
    parser.add_argument(
        "--out", type=user_folder, metavar="DIR", help="write the tables there, and map.png, .svg, .pdf"
    )
    parser.add_argument(
        "--baseline", action="append", metavar="METHOD",
        help=f"method that all are compared with; give each ({' and '.join(BASELINES)})",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.rows == arguments.columns:
        raise ConfigError(f"--rows and --columns are both {arguments.rows}; give two settings")
    findings = tables_of(arguments.folders, arguments.metric)
    metric, collection = findings.metric, findings.collection
    accuracies_only(metric)
    if not higher_is_better(metric):
        raise ConfigError(f"--metric is {metric!r}, of which less is better; a map shows who leads in, say, {METRIC}")
    for name, key in (("--rows", arguments.rows), ("--columns", arguments.columns)):
        if wrong := _no_axis(key, collection.runs):
            raise ConfigError(f"{name} is {shown(key)!r}, {wrong}")
    baselines = (
        BASELINES if arguments.baseline is None else list(dict.fromkeys(map(collection.label_of, arguments.baseline)))
    )
    found = map_of(collection.runs, metric, arguments.rows, arguments.columns, baselines, collection.names)
    for kind in WRITERS if arguments.format == "all" else [arguments.format]:
        name, write = WRITERS[kind]
        if arguments.out is None:
            print(write(found))
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_text(arguments.out / name, write(found))
            print(arguments.out / name)
    if arguments.out is not None:
        for drawing in map_drawings(found):
            for path in plots.save(drawing.figure, arguments.out / drawing.name):
                print(path)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _no_axis(key: str, runs: Sequence[Run]) -> str:
    """Return why a setting can make no rows or columns, and which can; empty where it can."""
    known = sorted({key for run in runs for key in run.condition if not key.startswith("aggregator.")})
    if key in known:
        return ""
    why = f"which no run has as a setting{nearest(key, known)}"
    if key.partition(".")[0] in SEEDS:
        why = "over which a map takes the mean"
    if key.startswith("aggregator."):
        why = "which tells methods apart, and a map compares those within a cell"
    others = [other for other in differing([run.condition for run in runs]) if other in known]
    return f"{why}; the runs differ in {', '.join(others) or 'no other setting'}"

"""The tables of a map: how every method stands over all of it, and every cell; as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from jgesr_lightning.reporting.map_plot import stars
from jgesr_lightning.reporting.maps import GAIN, TOLERANCE, Map, Panel, Spot, text, words
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
from jgesr_lightning.reporting.statistics import Difference
from jgesr_lightning.reporting.tables import describe, when

STARS = (
    "* the 95 % interval (Student's t, paired by seed) leaves out zero; ** the one corrected for the number of methods "
    "in the cell (Holm) does, too"
)
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
        f"{describe(found.metric)} ({found.metric}), {when(found.metric)}: each method minus {found.both} of a cell, "
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


def caption(found: Map, panels: Sequence[Panel]) -> str:
    """Return what the picture of some panels shows."""
    title = f"{panels[0].title}: " if len(panels) == 1 else ""
    seeds = sorted({spot.seeds for panel in panels for spot in panel.spots.values()})
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    sure = f"{number} seeds; {STARS}, and frames the cell"
    sure = "One seed: nothing can be said of chance" if seeds == [1] else sure
    return (
        f"{title}which method leads ({describe(found.metric)}, {when(found.metric)}), and its lead over {found.both} "
        f"of the same cell in percentage points, by {words(found.rows)} and {words(found.columns)}; in brackets, where "
        f"that one leads, how far the best other method is below. {sure}."
    )


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

"""The picture of a map: in every cell the method that leads, in words and colour, and by how much; and its caption."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from jgesr_lightning.reporting.agg import Axes, Figure, Rectangle
from jgesr_lightning.reporting.maps import Map, Panel, Spot, text, words
from jgesr_lightning.reporting.plots import INK, drawing, looks
from jgesr_lightning.reporting.statistics import Difference
from jgesr_lightning.reporting.tables import describe, span, when
from jgesr_lightning.reporting.text import figure_text

STARS = (
    "* the 95 % interval (Student's t, paired by seed) leaves out zero; ** the one corrected for the number of methods "
    "in the cell (Holm) does, too"
)
_CELL = (0.8, 0.58)  # inches: three lines of nine wide characters
_LETTER = 0.085  # inches: a wide one
_LETTERS, _LINES = 11, 2  # of a method's name in a cell
_PER_ROW = 2  # panels side by side
_TINT = 0.35


def map_figure(found: Map, panels: Sequence[Panel] | None = None) -> Figure:
    """Return the panels of a map, two side by side.

    In a cell: the method that leads, and its lead over the better of the baselines; in brackets, where a baseline
    leads, the best other method's distance below it. A star: the interval by itself leaves out zero; two stars and a
    frame: the corrected one does. Methods whose names are too long for a cell have a number there, and stand below.

    Args:
        found: the map.
        panels: those to draw; None: all.
    """
    shown_panels = list(found.panels if panels is None else panels)
    leaders = {spot.leader for panel in found.panels for spot in panel.spots.values()}
    # the same in all of a map's pictures
    names, told = short_names([label for label in found.labels if label in leaders], found.names)
    drawn = {spot.leader for panel in shown_panels for spot in panel.spots.values()}
    lines = [name.split("\n") for name in names.values()]
    longest = max(len(line) for name in lines for line in name)
    cell = (max(_CELL[0], _LETTER * longest), _CELL[1] + 0.13 * (max(map(len, lines)) > 2))
    colours = {label: style["color"] for label, style in looks(found.labels).items()}
    across = min(_PER_ROW, len(shown_panels))
    down = -(-len(shown_panels) // across)
    wide = [max(len(panel.columns) for panel in shown_panels[place::across]) for place in range(across)]
    high = [max(len(panel.rows) for panel in shown_panels[line * across : (line + 1) * across]) for line in range(down)]
    width = max(3.0, 0.55 * across + cell[0] * sum(wide))
    letters = int(13 * width)  # an inch holds about 13
    legend = [
        line
        for label, text in told.items()
        if label in drawn
        for line in textwrap.wrap(text, letters, subsequent_indent="    ", break_on_hyphens=False)
    ]
    height = 0.85 * down + cell[1] * sum(high) + 0.18 * len(legend)
    with drawing():
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, width_ratios=wide, height_ratios=high)
        for axes in grid.flat[len(shown_panels) :]:
            axes.set_axis_off()
        for place, (axes, panel) in enumerate(zip(grid.flat, shown_panels, strict=False)):
            _panel(axes, panel, names, colours, (high[place // across], wide[place % across]))
            axes.set_xlabel(figure_text(words(found.columns)))
            axes.set_ylabel(figure_text(words(found.rows)))
        if legend:
            figure.supxlabel(figure_text("\n".join(legend)), fontsize=8.5, x=0.02, ha="left", linespacing=1.5)
    return figure


def caption(found: Map, panels: Sequence[Panel]) -> str:
    """Return what the picture of some panels shows."""
    title = f"{panels[0].title}: " if len(panels) == 1 else ""
    seeds = sorted({spot.seeds for panel in panels for spot in panel.spots.values()})
    sure = f"{span(seeds)} seeds; {STARS}, and frames the cell"
    sure = "One seed: nothing can be said of chance" if seeds == [1] else sure
    return (
        f"{title}which method leads ({describe(found.metric)}, {when(found.metric)}), and its lead over {found.both} "
        f"of the same cell in percentage points, by {words(found.rows)} and {words(found.columns)}; in brackets, where "
        f"that one leads, how far the best other method is below. {sure}."
    )


def _panel(
    axes: Axes, panel: Panel, names: Mapping[str, str], colours: Mapping[str, str], shape: tuple[int, int]
) -> None:
    rows, columns = panel.rows, panel.columns
    framed = []
    for down, row in enumerate(rows):
        for across, column in enumerate(columns):
            spot = panel.spots.get((row, column))
            if spot is None:
                axes.text(across, down, "not run", ha="center", va="center", fontsize=8.5, style="italic")
                continue
            corner = (across - 0.5, down - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=colours[spot.leader], alpha=_TINT, linewidth=0))
            if spot.lead is not None and spot.lead.clear_of_all:
                framed.append((across - 0.46, down - 0.46))
            axes.text(
                across, down, figure_text(f"{names[spot.leader]}\n{lead_text(spot)}"), ha="center", va="center",
                fontsize=8.5, linespacing=1.25,
            )  # fmt: skip
    for corner in framed:
        axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, edgecolor=INK, linewidth=1.6))
    axes.set_xticks(range(len(columns)), [figure_text(text(value)) for value in columns])
    axes.set_yticks(range(len(rows)), [figure_text(text(value)) for value in rows])
    axes.set_xticks([place - 0.5 for place in range(1, len(columns))], minor=True)
    axes.set_yticks([place - 0.5 for place in range(1, len(rows))], minor=True)
    axes.grid(True, which="minor", color="#FFFFFF", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.set_xlim(-0.5, shape[1] - 0.5)  # cells of all panels are of one size
    axes.set_ylim(shape[0] - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.set_title(figure_text("\n".join(textwrap.wrap(panel.title, max(14, 12 * shape[1])))))


def lead_text(spot: Spot) -> str:
    """Return the number of a cell: the lead, with the stars of its intervals; in brackets where a baseline leads."""
    if spot.base is None:
        missing = [label for label in spot.baselines if label not in spot.means]
        return f"no {' or '.join(missing)}" if missing else "other seeds"
    if spot.lead is None:
        return "alone"
    number = f"{spot.lead.mean:+.2f}{stars(spot.lead)}".replace("-", "\u2212")
    return f"({number})" if spot.leader in spot.baselines else number


def stars(one: Difference) -> str:
    """Return two stars where the corrected interval leaves out zero, one where the interval by itself does."""
    return " **" if one.clear_of_all else " *" if one.clear else ""


def short_names(labels: Sequence[str], names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    r"""Return label -> what stands in a cell, and label -> the line that explains it, where it is not the label.

    The study's name for a method goes before its label; what is too long gives way to a number.

    >>> short_names(["cfl", "jgesr (uniform)", "local (own=clean)"], {"local (own=clean)": "alone"})[0]
    {'cfl': 'cfl', 'jgesr (uniform)': 'jgesr\n(uniform)', 'local (own=clean)': 'alone'}
    >>> short_names(["jgesr (uniform, alpha=0.015)"], {})[1]
    {'jgesr (uniform, alpha=0.015)': '[1] jgesr (uniform, alpha=0.015)'}
    """
    found: dict[str, str] = {}
    legend: dict[str, str] = {}
    numbers = 0
    for label in labels:
        text = _fitted(names.get(label, label), _LINES + (label in names))
        if text is not None and label in names:
            legend[label] = f"{names[label]}: {label}"
        if text is None:
            numbers += 1
            text = f"{label.partition(' ')[0][: _LETTERS - 5]} [{numbers}]"
            legend[label] = f"[{numbers}] {label}"
        found[label] = text
    return found, legend


def _fitted(name: str, most: int) -> str | None:
    """Return a name in lines that fit into a cell, broken at spaces and after underscores; None if it does not fit."""
    lines = [""]
    for part in re.findall(r"[^ _]*[ _]*", name):
        if len(lines[-1]) + len(part.rstrip()) <= _LETTERS:
            lines[-1] += part
        else:
            lines.append(part)
    lines = [line.rstrip() for line in lines if line]
    return "\n".join(lines) if len(lines) <= most and max(map(len, lines), default=0) <= _LETTERS else None

"""Figures that compare methods: means with intervals, paired differences, and the distribution over clients.

They are narrow enough for a telephone, and side by side on a wider screen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jgesr_lightning.reporting.agg import Axes, Figure
from jgesr_lightning.reporting.plots import INK, Array, Looks, drawing, head
from jgesr_lightning.reporting.text import figure_text

WIDTH = 3.65  # inches: 350 pixels of a page
_LABEL = 24  # characters of a line of a method's name, beside its row
_MANY = 1500  # points beyond which a figure holds them as pixels


@dataclass(frozen=True)
class Dot:
    """A mean with its interval.

    Attributes:
        label: the method.
        mean: what was measured.
        half_width: of its confidence interval; None: no interval.
        paper: the paper's value, or None.
        wide_half_width: of the interval corrected for the number of comparisons; None: none.
        mark: signs of the table's remarks, after the name.
    """

    label: str
    mean: float
    half_width: float | None = None
    paper: float | None = None
    wide_half_width: float | None = None
    mark: str = ""


def dot_plot(dots: Sequence[Dot], styles: Looks, xlabel: str, title: str = "") -> Figure:
    """Return one row a method: its mean in percent, its interval, and the paper's value as an open diamond.

    Intervals end where percentages do. `styles`: `looks` of all labels of a set of figures.
    """
    figure, axes = _rows([f"{dot.label}{dot.mark}" for dot in dots], xlabel, title)
    with drawing():
        axes.set_xlim(*limits(dots, percent=True))
        for place, dot in enumerate(dots):
            _interval(axes, place, _ends(dot.mean, dot.half_width, percent=True), 1.6)
            _point(axes, place, dot, styles, "o", 6)
        with_paper = [(dot.paper, place) for place, dot in enumerate(dots) if dot.paper is not None]
        if with_paper:
            values, places = zip(*with_paper, strict=True)
            axes.plot(
                values, places, marker="D", markersize=6, linestyle="", markerfacecolor="none", markeredgecolor=INK,
                label="the paper's value",
            )  # fmt: skip
            figure.legend(loc="outside lower left", frameon=False, handletextpad=0.2)
    return figure


def forest_plot(dots: Sequence[Dot], styles: Looks, xlabel: str, title: str = "") -> Figure:
    """Return one row a method: its difference to the reference; the interval by itself is thick, the corrected thin.

    `styles`: `looks` of all labels of a set of figures.
    """
    figure, axes = _rows([dot.label for dot in dots], xlabel, title)
    with drawing():
        axes.set_xlim(*limits(dots, percent=False))
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, dot in enumerate(dots):
            _interval(axes, place, _ends(dot.mean, dot.wide_half_width), 0.9, caps=True)
            _interval(axes, place, _ends(dot.mean, dot.half_width), 2.8)
            _point(axes, place, dot, styles, "s", 5)
    return figure


def client_plot(rows: Sequence[tuple[str, Array, str]], styles: Looks, xlabel: str, title: str = "") -> Figure:
    """Return one row a method and one point a client, the mean as a stroke and the worst client named.

    Args:
        rows: method, its clients' values, and the name of the worst one.
        styles: `looks` of all labels of a set of figures.
        xlabel: what the values are.
        title: written above.
    """
    figure, axes = _rows([label for label, _, _ in rows], xlabel, title, height=0.44)
    generator = np.random.default_rng(0)  # only spreads points that would cover each other
    with drawing():
        many = sum(len(values) for _, values, _ in rows) > _MANY
        for place, (label, values, worst) in enumerate(rows):
            spread = place - 0.08 + generator.uniform(-0.2, 0.2, len(values))
            axes.plot(
                values, spread, marker="o", markersize=4, linestyle="", color=styles[label]["color"], alpha=0.55,
                markeredgewidth=0, rasterized=many,
            )  # fmt: skip
            axes.plot([values.mean()] * 2, [place - 0.38, place + 0.2], color=INK, linewidth=1.6)
            at = int(values.argmin())
            axes.plot(
                values[at], spread[at], marker="o", markersize=6, linestyle="", markerfacecolor="none",
                markeredgecolor=INK,
            )  # fmt: skip
            axes.text(
                0.01, place + 0.34, worst, transform=axes.get_yaxis_transform(), fontsize=8.5, ha="left", va="center"
            )
        low = min((float(values.min()) for _, values, _ in rows), default=0.0)
        axes.set_xlim(low - 0.05 * (100 - low) - 1, 100 + 0.02 * (100 - low) + 0.5)
    return figure


def _rows(labels: Sequence[str], xlabel: str, title: str, height: float = 0.3) -> tuple[Figure, Axes]:
    with drawing():
        figure = Figure(figsize=(WIDTH, 1.25 + height * len(labels)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_yticks(range(len(labels)), [figure_text(_short(label)) for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figure_text(xlabel))
        axes.grid(True, axis="x", color="#DDDDDD", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        head(figure, title)
    return figure, axes


def _short(label: str) -> str:
    """Return a label in two lines at most."""
    lines = textwrap.wrap(label, _LABEL)
    return "\n".join(lines if len(lines) < 3 else [lines[0], f"{' '.join(lines[1:])[: _LABEL - 1]}\u2026"])


def limits(dots: Sequence[Dot], percent: bool) -> tuple[float, float]:
    """Return the ends of the axis of means in percent, or of differences, zero among them.

    All means are shown, and intervals up to twice their spread: with two seeds one alone would fill the picture.
    """
    values = [dot.mean for dot in dots]
    values += [dot.paper for dot in dots if dot.paper is not None] if percent else [0.0]
    low, high = min(values), max(values)
    reach = max(high - low, 1.0)
    ends = _all_ends(dots, percent)
    left = max(low - 1.2 * reach, min(low, *ends) - 0.05 * reach)
    right = min(high + 1.2 * reach, max(high, *ends) + 0.05 * reach)
    return (max(0.0, left), min(100.0, right)) if percent else (left, right)


def go_on(dots: Sequence[Dot], percent: bool) -> bool:
    """Return whether an interval goes on beyond the axis, where an arrow says so."""
    low, high = limits(dots, percent)
    ends = _all_ends(dots, percent)
    return min(ends) < low or max(ends) > high


def _all_ends(dots: Sequence[Dot], percent: bool) -> list[float]:
    """Return the ends of all intervals, of each method the widest; its mean where it has none."""
    widths = [dot.wide_half_width or dot.half_width or 0.0 for dot in dots]
    return [end for dot, half in zip(dots, widths, strict=True) for end in _ends(dot.mean, half, percent)]


def _ends(mean: float, half: float | None, percent: bool = False) -> tuple[float, ...]:
    """Return the ends of an interval, within what percentages can be; none without a width."""
    if half is None:
        return ()
    return (max(0.0, mean - half), min(100.0, mean + half)) if percent else (mean - half, mean + half)


def _interval(axes: Axes, place: int, ends: tuple[float, ...], width: float, caps: bool = False) -> None:
    """Draw an interval, with an arrow at each end of the axis beyond which it goes on."""
    if not ends:
        return
    axes.plot(ends, [place, place], color=INK, linewidth=width, solid_capstyle="butt")
    if caps:
        axes.plot(ends, [place, place], color=INK, marker="|", markersize=6, linestyle="")
    low, high = axes.get_xlim()
    inset = 0.015 * (high - low)  # heads that stood out would reach into the labels
    for edge, marker, beyond in ((low + inset, "<", ends[0] < low), (high - inset, ">", ends[1] > high)):
        if beyond:
            axes.plot(edge, place, color=INK, marker=marker, markersize=5, linestyle="", clip_on=False)


def _point(axes: Axes, place: int, dot: Dot, styles: Looks, marker: str, size: float) -> None:
    colour = styles[dot.label]["color"]
    axes.plot(dot.mean, place, marker=marker, markersize=size, linestyle="", color=colour, clip_on=False, zorder=3)

"""The graph between clients as nodes and edges, each node showing the classes that its client holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jgesr_lightning.reporting.agg import Axes, Figure, Wedge
from jgesr_lightning.reporting.plots import ACCENT, CLASS_COLOURS, INK, Array, drawing, head
from jgesr_lightning.reporting.sources import Held
from jgesr_lightning.reporting.text import figure_text

_EDGES = 60  # more cannot be told apart, unless there are more clients
_LEAST = 0.03  # of the heaviest weight


def graph_network(graph: ArrayLike, order: Sequence[int], title: str = "", held: Held | None = None) -> Figure:
    """Return the graph with its clients on a circle, neighbours in `order` side by side.

    An edge is as broad as its weight (of both directions the mean). Those that `strongest` leaves out are counted in a
    line below.

    Args:
        graph: (K, K) non-negative weights.
        order: order of the clients around the circle.
        title: written above.
        held: what the clients hold; None: plain nodes.
    """
    weights = np.asarray(graph, dtype=np.float64)
    count = len(weights)
    classes, counts = ((), None) if held is None else (held[0], np.asarray(held[1], dtype=np.float64))
    angles = np.empty(count)
    angles[list(order)] = np.pi / 2 - 2 * np.pi * np.arange(count) / max(count, 1)
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    radius = min(0.13, 2.2 / max(count, 1))
    with drawing():
        figure = Figure(figsize=(3.65, 4.6 if classes else 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_xlim(-1.32, 1.32)
        axes.set_ylim(-1.32, 1.32)
        drawn, total, share = strongest(weights)
        _edges(axes, (weights + weights.T) / 2, drawn, places)
        if len(drawn) < total:
            told = f"the {len(drawn)} strongest of {total} edges: {share:.0%} of the weight"
            axes.text(0, -1.3, told, ha="center", va="top", fontsize=8.5, style="italic")
        for client, (x, y) in enumerate(places):
            _node(axes, x, y, radius, None if counts is None else counts[client])
            axes.text(
                x * (1.06 + radius), y * (1.06 + radius), str(client), ha="center", va="center",
                fontsize=8.5 if count <= 60 else 5,
            )  # fmt: skip
        if counts is not None and len(classes) <= 20:
            figure.legend(
                [Wedge((0, 0), 1, 0, 360, color=CLASS_COLOURS[k % len(CLASS_COLOURS)]) for k in range(len(classes))],
                [figure_text(name) for name in classes],
                loc="outside lower center", ncols=5 if max(map(len, classes)) < 4 else 3, frameon=False,
                handlelength=1.0, columnspacing=1.0,
            )  # fmt: skip
        head(figure, title)
    return figure


def strongest(graph: ArrayLike) -> tuple[list[tuple[int, int]], int, float]:
    """Return the edges that are drawn, the number of all, and the share of the weight that the drawn ones have.

    Drawn are those of at least 3 % of the heaviest, and of these the heaviest 60, or two a client where that is more.

    >>> strongest([[0, 4, 2], [4, 0, 0], [2, 0, 0]])
    ([(0, 1), (0, 2)], 2, 1.0)
    """
    weights = np.asarray(graph, dtype=np.float64)
    upper = np.maximum(np.nan_to_num(np.triu((weights + weights.T) / 2, 1)), 0)
    total = float(upper.sum())
    if total <= 0:
        return [], 0, 1.0
    first, second = np.nonzero(upper >= _LEAST * upper.max())
    heaviest = np.argsort(-upper[first, second], kind="stable")[: max(_EDGES, 2 * len(weights))]
    drawn = [(int(first[place]), int(second[place])) for place in heaviest]
    return drawn, int(np.count_nonzero(upper)), float(sum(upper[edge] for edge in drawn)) / total


def _edges(axes: Axes, weights: Array, drawn: Sequence[tuple[int, int]], places: Array) -> None:
    top = max((weights[edge] for edge in drawn), default=1.0)
    broad = 3.2 * min(1.0, 30 / max(len(drawn), 1))
    for m, n in reversed(drawn):  # the heaviest on top
        share = weights[m, n] / top
        axes.plot(
            places[[m, n], 0], places[[m, n], 1], color=ACCENT, linewidth=0.4 + broad * share, alpha=0.25 + 0.6 * share,
            solid_capstyle="round", zorder=1,
        )  # fmt: skip


def _node(axes: Axes, x: float, y: float, radius: float, held: Array | None) -> None:
    total = 0.0 if held is None else float(held.sum())
    if held is None or total <= 0:
        axes.add_patch(Wedge((x, y), radius, 0, 360, facecolor="#DDDDDD", edgecolor=INK, linewidth=0.6, zorder=2))
        return
    start = 90.0
    for place, share in enumerate(held / total):
        if share > 0:
            end = start + 360 * share
            colour = CLASS_COLOURS[place % len(CLASS_COLOURS)]
            axes.add_patch(Wedge((x, y), radius, start, end, facecolor=colour, linewidth=0, zorder=2))
            start = end
    axes.add_patch(Wedge((x, y), radius, 0, 360, width=0.004, facecolor=INK, edgecolor=INK, linewidth=0.4, zorder=3))

"""Figures as pure functions from numbers to a matplotlib `Figure`; no display, no global state, nothing kept alive.

Every series has its own colour, line style and marker, and every class its own colour and hatch, so that the figures
can be read in grey. A method has one colour in all figures, and one line and marker wherever it is a line, see `looks`.
The colours of the main methods are those of Okabe and Ito, which the colour-blind can tell apart.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from jgesr_lightning.files import write_bytes
from jgesr_lightning.reporting.agg import (
    Axes,
    Bbox,
    ConstrainedLayoutEngine,
    Figure,
    FigureCanvasAgg,
    LinearSegmentedColormap,
    MaxNLocator,
    TransformedBbox,
    mpl,
)
from jgesr_lightning.reporting.sources import Held
from jgesr_lightning.reporting.text import figure_text

Array = NDArray[np.float64]
Looks = Mapping[str, dict[str, Any]]

STYLES: Mapping[str, tuple[str, str, str]] = {  # colour, line style, marker
    "jgesr": ("#0072B2", "-", "o"),
    "jgesr (uniform)": ("#56B4E9", "--", "s"),
    "two_step": ("#009E73", "-.", "^"),
    "two_step (uniform)": ("#66C2A5", ":", "v"),
    "fedavg": ("#D55E00", "-", "D"),
    "fedprox": ("#E69F00", "--", "v"),
    "cfl": ("#CC79A7", "-.", "P"),
    "fedamp": ("#7F3C8D", ":", "X"),
    "pfedgraph": ("#8C6D31", (0, (5, 1, 1, 1, 1, 1)), "<"),  # type: ignore[dict-item]
    "local": ("#555555", (0, (1, 1)), "*"),  # type: ignore[dict-item]
}
_OTHERS = [  # colours of no method above; the grey one comes last, since `local` is grey in the tints of a map
    ("#A50F26", (0, (3, 1)), ">"),
    ("#2B2D8C", (0, (6, 2)), "h"),
    ("#8FB31E", (0, (1, 2)), "p"),
    ("#E7298A", (0, (4, 1, 1, 1)), "d"),
    ("#00565E", "-", "H"),
    ("#000000", "-.", "8"),
]
INK, ACCENT = "#222222", "#0072B2"
DARK: Mapping[str, str] = {  # what colours become on a dark page
    INK: "#E6E6E6", "#DDDDDD": "#3F4650", "#FFFFFF": "#16181D", "#000000": "#F2F2F2", "#555555": "#B4B4B4",
    "#0072B2": "#4FA8E0", "#009E73": "#2CC295", "#D55E00": "#FF8A3D", "#E69F00": "#F2B33D", "#CC79A7": "#E29AC2",
    "#7F3C8D": "#C08AD0", "#8C6D31": "#C8A45C", "#56B4E9": "#B5E0FF", "#66C2A5": "#B0F0DA",
    "#A50F26": "#E5566B", "#2B2D8C": "#8A8DF0", "#8FB31E": "#B9DD4A", "#E7298A": "#FF6DB3", "#00565E": "#3FA3AD",
}  # fmt: skip
_MARKER_SIZES = {"*": 8.0, "P": 6.5, "X": 6.5, "^": 5.5, "v": 5.5, "<": 5.5, ">": 5.5}  # to look alike in area
CLASS_COLOURS = (
    "#4E79A7", "#F28E2B", "#B07AA1", "#76B7B2", "#E15759",
    "#EDC948", "#59A14F", "#FF9DA7", "#9C755F", "#BAB0AC",
)  # fmt: skip
# straight strokes only: dots and rings cost a hundred times their bytes in an SVG file
_HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "/", "--\\\\", "||//")
_WEIGHTS = LinearSegmentedColormap.from_list("weights", [(0, 0.45, 0.7, 0.0), (0, 0.45, 0.7, 1.0)])
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,  # 11 pixels of a page
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.transparent": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "jgesr_lightning",  # equal numbers give equal files
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # TrueType: publishers refuse matplotlib's own, type 3
}
_DATES = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
"""Format of a file -> what is left out of its metadata, as it would differ between equal figures."""


@dataclass(frozen=True)
class Series:
    """One line of a figure.

    Attributes:
        label: name of the method, or what else tells it apart.
        x: (n,) rounds, rates, iterations.
        mean: (n,) means over runs; NaN where not measured.
        std: (n,) standard deviations over runs, or None for a single run.
    """

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None = None


def graph_heatmap(
    graph: ArrayLike,
    order: Sequence[int],
    title: str = "",
    label: str = "edge weight",
    held: Held | None = None,
) -> Figure:
    """Return a heat map of a graph between clients, beside each client's label distribution where that is given.

    Args:
        graph: (K, K) non-negative weights.
        order: order of the clients along both axes, such as `cluster_order` gives.
        title: written above.
        label: what the weights are; stands at the colour bar.
        held: what the clients hold.
    """
    weights = np.asarray(graph, dtype=np.float64)
    rows = list(order)
    with drawing():
        if held is None:
            figure = Figure(figsize=(4.6, 3.9), layout="constrained")
            _heatmap(figure, figure.add_subplot(), weights, rows, label)
        else:
            classes, counts = held
            figure = Figure(figsize=(8.6, 4.2), layout=ConstrainedLayoutEngine(wspace=0.06))
            left, right = figure.subplots(1, 2, width_ratios=(1.2, 1), sharey=True)
            _heatmap(figure, left, weights, rows, label, aspect="auto")  # rows level with the bars beside them
            _label_bars(right, counts[rows], classes, rows)
        head(figure, title)
    return figure


def accuracy_per_round(series: Sequence[Series], styles: Looks, ylabel: str, title: str = "") -> Figure:
    """Return accuracies per round, as shares of one in `series` and in percent on the axis.

    Bands are one standard deviation over runs to either side, as far as accuracies go. Round 0, a guess, does not
    decide how far down the axis goes. `styles`: `looks` of all labels of a set of figures.
    """
    figure, axes = _lines(series, styles, "round", ylabel, title)
    points = [point for line in series for point in zip(line.x, line.mean, strict=True)]
    after = [mean for number, mean in points if number > 0 and np.isfinite(mean)]
    if after:
        axes.set_ylim(bottom=max(0, 100 * min(after) - 5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def accuracy_against(
    series: Sequence[Series], styles: Looks, xlabel: str, ylabel: str, title: str = "", logarithmic: bool = False
) -> Figure:
    """Return accuracies against a setting, such as the missing rate; bands are one standard deviation over runs.

    Args:
        series: one line a method.
        styles: `looks` of all labels of a set of figures.
        xlabel: what the setting is.
        ylabel: what the accuracies are.
        title: written above.
        logarithmic: whether the setting's axis is logarithmic; its values must then be positive.
    """
    figure, axes = _lines(series, styles, xlabel, ylabel, title)
    if logarithmic:
        axes.set_xscale("log")
        ticks = sorted({float(value) for line in series for value in line.x})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    return figure


def objective_trace(series: Sequence[Series], styles: Looks, title: str = "") -> Figure:
    """Return J above the smallest value seen in each series, on a logarithmic axis, against the iteration.

    A solver's objective has no natural zero; what can be judged is how fast, and whether steadily, it comes down.
    """
    with drawing():
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for line in series:
            values = np.asarray(line.mean, dtype=np.float64)
            gap = values - np.nanmin(values) if len(values) else values
            gap = np.where(gap > 0, gap, np.nan)  # the smallest value itself has no logarithm
            _draw(axes, line, gap, styles[line.label])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # exponents would be too small to read
        axes.set_xlabel("iteration")
        axes.set_ylabel("objective above its smallest value")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, axes, title)
    return figure


def cluster_order(graph: ArrayLike) -> list[int]:
    """Return an order of the clients in which strongly joined ones are neighbours.

    Average-linkage clustering of the weights, leaves from left to right; of two branches, the one with the lowest
    client comes first.

    >>> cluster_order([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    [0, 2, 1]
    """
    weights = np.nan_to_num(np.asarray(graph, dtype=np.float64))
    count = len(weights)
    if count < 3:
        return list(range(count))
    similarity = (weights + weights.T) / 2
    distance = similarity.max() - similarity  # average linkage: the order is that of the similarities
    np.fill_diagonal(distance, 0.0)
    merges = linkage(squareform(distance, checks=False), "average")
    groups = [[client] for client in range(count)]
    for first, second, *_ in merges:
        lower, upper = sorted((groups[int(first)], groups[int(second)]), key=min)
        groups.append(lower + upper)
    return groups[-1]


def looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return label -> colour, line style and marker.

    Labels that are no method's name take one after another those that no method has, so give all labels of a set of
    figures, in one order, for a method to look the same in all of them.
    """
    styles: dict[str, tuple[Any, ...]] = {}
    for label in dict.fromkeys(labels):
        styles[label] = STYLES.get(label) or _other(sum(known not in STYLES for known in styles))
    return {label: dict(zip(("color", "linestyle", "marker"), style, strict=True)) for label, style in styles.items()}


def _other(place: int) -> tuple[Any, ...]:
    """Return a style for the label at `place` of those without one of their own; no two of 216 are equal."""
    count = len(_OTHERS)
    again, at = divmod(place, count)  # where they are used up, they are combined otherwise
    shifts = (0, again, 2 * again + again // count)
    return tuple(_OTHERS[(at + shift) % count][part] for part, shift in enumerate(shifts))


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem.png`` (200 dots an inch), ``stem.svg`` and ``stem.pdf``, making the folder; return their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, date in _DATES.items():
        buffer = io.BytesIO()
        with drawing():
            FigureCanvasAgg(figure)
            figure.savefig(buffer, format=kind, dpi=200, metadata={date: None})
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        write_bytes(paths[-1], buffer.getvalue())
    return paths


def page_svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element to stand in a page: text is text, colours are the page's.

    Args:
        figure: the figure.
        name: unique in the page, so that no two figures' parts are taken for each other.
    """
    buffer = io.BytesIO()
    with drawing(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    # hundredths of a point are fine enough; what is written in a figure stays as it is
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d{2})\d+", r"\1", re.sub(r"\s+", " ", tag[0])), text)
    text = re.sub(r' id="(?![mphC][0-9a-f]{6})[^"]*"', "", text)  # only markers, clips, hatches are referred to
    return re.sub(r"((?:fill|stroke): )#([0-9a-f]{6})(?![0-9a-f])", _page_colour, text)


def _page_colour(found: re.Match[str]) -> str:
    colour = f"#{found[2]}"
    return f"{found[1]}var(--c{found[2]})" if colour.upper() in DARK else found[0]


def page_colours(dark: bool) -> str:
    """Return the definitions of the colours that `page_svg` leaves to the page."""
    return " ".join(f"--c{light[1:].lower()}: {other if dark else light};" for light, other in DARK.items())


def to_pixels(figure: Figure, dpi: int = 120) -> NDArray[np.uint8]:
    """Return a figure as (height, width, 3) pixels."""
    with drawing():
        figure.set_dpi(dpi)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our style inside the block; the settings of others come back after it."""
    with mpl.rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name may use any script
        yield


def _heatmap(
    figure: Figure, axes: Axes, weights: Array, rows: list[int], label: str, aspect: Literal["equal", "auto"] = "equal"
) -> None:
    shown = weights[np.ix_(rows, rows)]
    finite = shown[np.isfinite(shown)]
    top = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    # transparent where nothing is: the same picture on white paper and on a dark page
    image = axes.imshow(shown, cmap=_WEIGHTS, vmin=0.0, vmax=top, interpolation="nearest", aspect=aspect)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label(figure_text(label))
    bar.outline.set_linewidth(0.7)
    _client_ticks(axes, rows)
    axes.set_xlabel("client")
    axes.set_ylabel("client")
    axes.spines[["top", "right"]].set_visible(True)


def _client_ticks(axes: Axes, rows: list[int]) -> None:
    every = max(1, -(-len(rows) // 25))  # more than 25 numbers would run into each other
    places = list(range(0, len(rows), every))
    names = [str(rows[place]) for place in places]
    axes.set_yticks(places, names)
    axes.set_xticks(places, names, rotation=90 if len(rows) > 12 else 0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_tick_params(labelsize=8.5)


def _label_bars(axes: Axes, held: Array, classes: Sequence[str], rows: list[int]) -> None:
    totals = held.sum(1)
    shares = held / np.where(totals > 0, totals, 1)[:, None]
    places, left = np.arange(len(rows)), np.zeros(len(rows))
    narrow = len(rows) > 40
    for column, name in enumerate(classes):
        share = shares[:, column]
        held_here = share > 0  # a bar of no width still costs its outline and hatch in the file
        axes.barh(
            places[held_here],
            share[held_here],
            left=left[held_here],
            height=1.0 if narrow else 0.82,
            color=CLASS_COLOURS[column % len(CLASS_COLOURS)],
            hatch=None if narrow else _HATCHES[column % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.0 if narrow else 0.4,
            label=figure_text(name),
        )
        left = left + share
    for place, total in enumerate(totals):
        if not narrow:
            axes.text(1.015, place, f"{int(total):,}", va="center", fontsize=8.5)
    if not narrow:
        axes.text(1.015, -0.9, "samples", va="bottom", fontsize=8.5, style="italic")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a client's samples")
    axes.tick_params(axis="y", labelleft=True)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.14, 0.5),
        title="class",
        frameon=False,
        handlelength=1.6,
        handleheight=1.2,
        ncols=-(-len(classes) // 20),
    )


def _lines(series: Sequence[Series], styles: Looks, xlabel: str, ylabel: str, title: str) -> tuple[Figure, Axes]:
    with drawing():
        figure = Figure(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for line in series:
            style = styles[line.label]
            mean = 100 * np.asarray(line.mean, dtype=np.float64)
            _draw(axes, line, mean, style)
            if line.std is None:
                continue
            std = 100 * np.asarray(line.std, dtype=np.float64)
            low, high = (np.clip(mean + side * std, 0, 100) for side in (-1, 1))
            axes.fill_between(line.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set_xlabel(figure_text(xlabel))
        axes.set_ylabel(figure_text(ylabel))
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(0, bottom), min(100, top))
        _whole(axes)
        _finish(figure, axes, title)
    return figure, axes


def _whole(axes: Axes) -> None:
    """Draw markers at the axis' upper end whole: a method may be right on all samples."""
    room = TransformedBbox(Bbox.from_extents(0, 0, 1, 1.03), axes.transAxes)
    for line in axes.get_lines():
        line.set_clip_box(room)


def _draw(axes: Axes, line: Series, values: Array, style: dict[str, Any]) -> None:
    measured = np.flatnonzero(np.isfinite(values))
    x = np.asarray(line.x, dtype=np.float64)
    axes.plot(
        x[measured],
        values[measured],
        label=figure_text(line.label),
        linewidth=1.5,
        markersize=_MARKER_SIZES.get(style["marker"], 4.5),
        markeredgecolor="white",
        markeredgewidth=0.4,
        markevery=max(1, len(measured) // 10),
        **style,
    )


def head(figure: Figure, title: str) -> None:
    """Write a title above a figure, if there is one, in as many lines as its width asks for."""
    if title:
        lines = textwrap.wrap(title, int(figure.get_figwidth() * 12), break_on_hyphens=False)  # letters an inch
        figure.suptitle(figure_text("\n".join(lines)), fontsize=10)


def _finish(figure: Figure, axes: Axes, title: str) -> None:
    axes.grid(True, color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # in the order in which the lines end, best on top: the legend can then be read beside the lines
        ends = [_last(line) for line in handles]
        ranked = sorted(range(len(handles)), key=lambda place: -ends[place])
        axes.legend(
            [handles[place] for place in ranked],
            [labels[place] for place in ranked],
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            handlelength=3.4,
        )
    head(figure, title)


def _last(line: Any) -> float:
    heights = line.get_ydata()
    return float(heights[-1]) if len(heights) else -np.inf

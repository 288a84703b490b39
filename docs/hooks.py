"""What the site needs at every build: the architecture drawn from the imports that the code has; formulas as MathML."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp
from latex2mathml.converter import convert
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

ROOT = Path(__file__).parent.parent
PACKAGE = "jgesr_lightning"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, ROW, SWEEPS = 12.0, 0.8, 40
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)
LINE_START = re.compile(r"(?<!\n)\n(?=\$[^$])")  # a formula there would be taken for a paragraph of its own
COLOURS = {
    "the mathematics": ("#dcedc8", ("graph", "solvers", "aggregators")),
    "clients and their data": (
        "#bbdefb",
        ("client", "training", "data", "models", "channel", "optimizers", "schedules"),
    ),
    "a run": (
        "#ffe0b2",
        ("experiment", "build", "federation", "plan", "orchestrator", "callbacks", "runtime", "records", "measures"),
    ),
    "everything else": ("#eceff1", ()),
}


def on_pre_build(config: Any) -> None:
    """MkDocs calls this before it reads the pages."""
    draw(PICTURE)


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Turn $...$ and $$...$$ into what browsers show by themselves, so that pages load no scripts from elsewhere."""

    def formula(found: re.Match[str]) -> str:
        block, line = found.groups()
        text = (block or line).replace(r"\deg", r"\operatorname{deg}").replace("\n", " ")
        shown = convert(text, display="block" if block else "inline")
        return shown.replace("*", "&#42;").replace("_", "&#95;")  # which Markdown would take for emphasis

    pieces = CODE.split(LINE_START.sub(" ", markdown))  # code stays as it is: every second piece
    return "".join(piece if i % 2 else FORMULA.sub(formula, piece) for i, piece in enumerate(pieces))


def parts() -> list[str]:
    """Return the modules and packages that the import contract in pyproject.toml names, highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name.strip(" ()") for layer in named for name in layer.replace(":", "|").split("|")]


def imports(names: list[str]) -> dict[str, set[str]]:
    """Return what each part imports directly, without what follows from longer ways (a imports b, b imports c)."""
    graph = grimp.build_graph(PACKAGE)
    part = {}
    for name in names:
        whole = f"{PACKAGE}.{name}"
        if whole in graph.modules:
            part |= dict.fromkeys({whole, *graph.find_descendants(whole)}, name)
    direct: dict[str, set[str]] = {name: set() for name in dict.fromkeys(part.values())}
    for module, importer in part.items():
        direct[importer] |= {part[m] for m in graph.find_modules_directly_imported_by(module) if m in part}
        direct[importer].discard(importer)
    reached: dict[str, set[str]] = {}
    for name in reversed(names):  # the lowest first: imports point downwards
        if name in direct:
            reached[name] = direct[name].union(*(reached[other] for other in direct[name]))
    return {
        name: {other for other in others if not any(other in reached[between] for between in others)}
        for name, others in direct.items()
    }


def place(below: dict[str, set[str]], names: list[str]) -> tuple[dict[str, tuple[float, int]], list[list[str]]]:
    """Return (x, row) of every part, row 0 lowest, and the way of every arrow, with points in the rows it crosses."""
    level: dict[str, int] = {}
    for name in reversed([name for name in names if name in below]):
        level[name] = 1 + max((level[other] for other in below[name]), default=-1)
    for name in below:  # what imports nothing stands right below the lowest of those that import it
        above = [level[other] for other, others in below.items() if name in others]
        if not below[name] and above:
            level[name] = min(above) - 1
    ways = []
    for name, others in below.items():
        for other in sorted(others):
            between = [f"{name}>{other}>{row}" for row in range(level[name] - 1, level[other], -1)]
            level |= {point: level[name] - 1 - i for i, point in enumerate(between)}
            ways.append([name, *between, other])
    neighbours: dict[str, list[str]] = {point: [] for point in level}
    for way in ways:
        for upper, lower in pairwise(way):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    rows = [[point for point in level if level[point] == row] for row in range(max(level.values()) + 1)]
    x = {point: (i + 0.5) / len(row) for row in rows for i, point in enumerate(row)}
    room = {point: 0.012 if ">" in point else (0.09 * len(point) + 0.5) / WIDTH for point in level}
    for _ in range(SWEEPS):  # towards the mean of the neighbours, as near as the boxes of the row allow
        for row in [*rows, *reversed(rows)]:
            near = {p: neighbours[p] or [p] for p in row}
            wish = {p: sum(x[n] for n in near[p]) / len(near[p]) for p in row}
            row.sort(key=lambda point: wish[point])
            x |= spread([wish[p] for p in row], [room[p] for p in row], row)
    return {point: (x[point], level[point]) for point in level}, ways


def spread(wishes: list[float], rooms: list[float], row: list[str]) -> dict[str, float]:
    """Return places in [0, 1], in the given order, as wished where boxes of these widths do not overlap."""
    groups: list[list[float]] = []  # start as wished, width, number: neighbours that touch move together
    for wish, room in zip(wishes, rooms, strict=True):
        groups.append([wish - room / 2, room, 1])
        while len(groups) > 1 and groups[-2][0] + groups[-2][1] > groups[-1][0]:
            start, width, count = groups.pop()
            other = groups[-1]
            other[0] = (other[0] * other[2] + (start - other[1]) * count) / (other[2] + count)
            other[1], other[2] = other[1] + width, other[2] + count
    starts, i, least = [], 0, 0.0
    for start, width, count in groups:
        begin = max(least, min(start, 1 - width))
        for room in rooms[i : i + int(count)]:
            starts.append(begin)
            begin += room
        i, least = i + int(count), begin
    over = max(0.0, least - 1)  # what does not fit at the right moves everything to the left
    return {p: start - over + room / 2 for p, start, room in zip(row, starts, rooms, strict=True)}


def draw(path: Path) -> None:
    """Write the picture: who imports stands above what is imported."""
    names = parts()
    below = imports(names)
    places, ways = place(below, names)
    height = ROW * (1 + max(row for _, row in places.values()))
    figure = Figure(figsize=(WIDTH, height + 0.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(-0.6, height)
    axes.axis("off")
    at = {point: (WIDTH * x, ROW * (row + 0.5)) for point, (x, row) in places.items()}
    for way in ways:
        points, codes = [(at[way[0]][0], at[way[0]][1] - 0.2)], [Curve.MOVETO]
        for lower in way[1:]:
            (x0, y0), (x1, y1) = points[-1], at[lower]
            y1 += 0.24 if lower == way[-1] else 0
            points += [(x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), (x1, y1)]
            codes += [Curve.CURVE4] * 3
        axes.add_patch(PathPatch(Curve(points, codes), facecolor="none", edgecolor="#546e7a", lw=0.9, alpha=0.7))
        x, y = points[-1]
        axes.fill([x - 0.05, x + 0.05, x], [y + 0.06, y + 0.06, y - 0.03], color="#546e7a", lw=0)
    for name in below:
        x, y = at[name]
        half = 0.045 * len(name) + 0.13
        colour = next(c for c, members in COLOURS.values() if name in members or not members)
        box = FancyBboxPatch((x - half, y - 0.17), 2 * half, 0.34, boxstyle="round,pad=0.03", fc=colour, ec="#455a64")
        axes.add_patch(box)
        axes.text(x, y, name, ha="center", va="center", fontsize=9)
    for i, (words, (colour, _)) in enumerate(COLOURS.items()):
        x = WIDTH * (0.14 + 0.22 * i)
        axes.add_patch(FancyBboxPatch((x, -0.4), 0.25, 0.14, boxstyle="round,pad=0.02", fc=colour, ec="#455a64"))
        axes.text(x + 0.4, -0.33, words, va="center", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "jgesr_lightning"}):  # the same bytes for the same imports
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)

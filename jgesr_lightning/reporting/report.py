"""One HTML page: what was found, in words, pictures and tables, and the way to each run; nothing is fetched.

``python -m jgesr_lightning report RUNS ... [--metric M] [--reference METHOD] [--out FILE]``
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from jgesr_lightning.arguments import CommandParser, first_line
from jgesr_lightning.files import write_text
from jgesr_lightning.paths import PathError, user_file
from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.figures import Drawing, draw_block, looks_of, map_drawings, unique
from jgesr_lightning.reporting.map import panel_grid, standings_grid
from jgesr_lightning.reporting.maps import map_of
from jgesr_lightning.reporting.options import add_arguments, beside
from jgesr_lightning.reporting.render import ABSENT, diagnostics, grids, parts
from jgesr_lightning.reporting.runs import Run, blocks
from jgesr_lightning.reporting.sources import Folder
from jgesr_lightning.reporting.tables import Findings, column_title, in_percent, protocol_text, tables_of
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.reporting.words import reading, summary

LIMIT = 1_900_000
"""Bytes beyond which pictures are left out, and named: the page stays below two megabytes."""
_FOR_RUNS = 0.15  # part of it that the list of runs and the tables may take
_NARROW = 400  # points
_LEAST = 5_000  # bytes of a picture, about: where there is less room none is drawn


def page(found: Findings, target: Path) -> str:
    """Return the page.

    Args:
        found: the tables and the runs.
        target: where the page will stand: links to the runs are relative to it.
    """
    runs = found.collection.runs
    pictures = _Pictures(int(LIMIT * (1 - _FOR_RUNS)) - 600 * len(runs))
    taken: set[str] = set()
    styles = looks_of(found.collection)
    sections = []
    plane = map_of(runs, found.metric, names=found.collection.names)
    of_map: dict[str, Any] = {}
    if plane.is_plane:
        of_map = {
            "standings": standings_grid(plane),
            "grids": [panel_grid(plane, panel) for panel in plane.panels],
            **pictures.of(unique(map_drawings(plane, separately=True), 1, taken)),
        }
    for number, (block, table) in enumerate(zip(blocks(runs), found.tables, strict=True), 1):
        drawings = draw_block(block, table, styles, compare_only=plane.is_plane) if table.unit else iter(())
        sections.append(
            {
                "words": summary(table),
                "reading": reading(table, protocol_text(block.runs[0].protocol)),
                "grids": grids(table),
                "protocol": table.protocol,
                "diagnostics": diagnostics(block, table),
                "differs": shown(", ".join(f"{key} is {value}" for key, value in block.differs.items()), 1000),
                **pictures.of(unique(drawings, number, taken)),
            }
        )
    environment = Environment(loader=PackageLoader("jgesr_lightning.reporting"), autoescape=True, trim_blocks=True)
    environment.filters["minus"] = _true_minus
    environment.filters["parts"] = parts
    return environment.get_template("page.html.j2").render(
        title=f"Results of {len(runs)} run{'' if len(runs) == 1 else 's'}",
        light=Markup(plots.page_colours(dark=False)),
        dark=Markup(plots.page_colours(dark=True)),
        map=of_map,
        sections=sections,
        left_out=pictures.left_out,
        notes=found.collection.notes,
        metric=found.metric,
        runs=[_run(run, found, target) for run in runs],
    )


class _Pictures:
    """Turns drawings into parts of the page while there is room.

    Args:
        room: bytes.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.left_out: list[str] = []

    def of(self, drawings: Iterable[Drawing]) -> dict[str, list[Mapping[str, Any]]]:
        """Return kind -> pictures; the names of those that there is no room for are kept."""
        drawn: dict[str, list[Mapping[str, Any]]] = {}
        for drawing in drawings:
            svg = _svg(drawing) if self.room > _LEAST else ""
            if not svg or len(svg) > self.room:
                self.left_out.append(drawing.name)
                continue
            self.room -= len(svg)
            drawn.setdefault(drawing.kind, []).append(
                {"name": drawing.name, "caption": drawing.caption, "svg": Markup(svg)}
            )
        return drawn


def _svg(drawing: Drawing) -> str:
    svg = plots.page_svg(drawing.figure, drawing.name)
    narrow = drawing.figure.get_figwidth() * 72 < _NARROW
    return svg.replace("<svg ", "<svg data-narrow ", 1) if narrow else svg


def _true_minus(text: str) -> str:
    """Return text whose negative numbers have a true minus."""
    return re.sub(r"(?<![^\s(\[])-(?=\d)", "\u2212", text)


def _run(run: Run, found: Findings, target: Path) -> dict[str, Any]:
    value, seconds = run.last(found.metric), run.summary.get("seconds", {}).get("total")
    percent = in_percent(found.metric)
    folder = _link(run.folder, target) if isinstance(run.source, Folder) else None
    links = [("config", f"{folder}/config.yaml")] if folder and (run.folder / "config.yaml").is_file() else []
    links += [("W&B", url)] if (url := _wandb_url(run)) else []
    texts = [
        run.label,
        column_title(run.column),
        shown(run.config["seed"]),
        str(run.last_round),
        ABSENT if value is None else f"{100 * value:.2f} %" if percent else f"{value:.4g}",
        ABSENT if seconds is None else f"{seconds:.0f}",
    ]
    return {"name": run.name, "folder": folder, "texts": texts, "links": links}


def _link(folder: Path, target: Path) -> str:
    """Return the way from the page to a folder, as a URL, whatever bytes the names have."""
    return quote(os.fsencode(os.path.relpath(folder.absolute(), target.absolute().parent)), safe="/.") or "."


def _wandb_url(run: Run) -> str | None:
    """Return the run's page at W&B, if the summary has one that a browser may open."""
    told = run.summary.get("wandb")
    url = told.get("url") if isinstance(told, Mapping) else None
    return url if isinstance(url, str) and urlsplit(url).scheme in ("http", "https") else None


def _page_file(text: str) -> Path:
    """Return the path that a user gave for the page; PathError where it is called like something else."""
    path = user_file(text)
    if path.suffix.lower() not in (".html", ".htm"):
        raise PathError(f"{shown(path)} does not end with .html, as a page must")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of the runs below some folders."""
    parser = CommandParser("report", first_line(__doc__), "report runs/table1_small")
    add_arguments(parser)
    parser.add_argument("--out", type=_page_file, metavar="FILE", help="the page (RUNS/report.html)")
    arguments = parser.parse_args(argv)
    found = tables_of(arguments.folders, arguments.metric, arguments.reference, drawn=True)
    target = arguments.out or beside(arguments.folders, "report.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page(found, target))
    print(target)
    return 0

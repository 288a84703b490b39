"""One HTML page with the tables and figures of a folder of runs; everything is inside it, nothing is fetched.

``python -m jgesr_lightning report runs/ [--metric accuracy/received] [--out FILE]``
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from jgesr_lightning.paths import user_path
from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.figures import Drawing, draw
from jgesr_lightning.reporting.runs import Run
from jgesr_lightning.reporting.table import (
    ABSENT,
    METRIC,
    Table,
    column_title,
    difference_to_paper,
    paired_rows,
    paired_title,
    paper_text,
    shows_paper,
    tables_of,
    value_text,
)
from jgesr_lightning.runtime.files import write_text

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: 1rem 0; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #444; vertical-align: bottom; }
.n, .paper { color: #555; } .scroll { overflow-x: auto; }
figure { margin: 2rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .protocol { color: #444; font-size: .9rem; }
"""


def page(tables: Sequence[Table], drawings: Iterable[Drawing], runs: Sequence[Run], notes: Sequence[str]) -> str:
    """Return the page."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>jgesr_lightning: results of {len(runs)} runs</title><style>{_STYLE}</style></head><body>",
        f"<h1>Results of {len(runs)} runs</h1>",
    ]
    for number, table in enumerate(tables, 1):
        parts.append(f"<h2>Table {number}</h2>" if len(tables) > 1 else "<h2>Table</h2>")
        parts.append(_table(table))
    if notes:
        parts.append("<h2>Left out</h2>" + _list(notes))
    parts.append("<h2>Figures</h2>")
    parts += [_figure(drawing) for drawing in drawings]
    parts.append(_run_list(runs))
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _table(table: Table) -> str:
    head, under = ["<th rowspan=2>method</th>"], []
    for column in table.columns:
        wide = shows_paper(table, column)
        head.append(f"<th colspan={3 if wide else 1}>{escape(column_title(column))}</th>")
        under.append(f"<th>measured{' (%)' if table.unit else ''}</th>")
        under += ["<th>paper</th>", "<th>difference</th>"] if wide else []
    rows = []
    for label in table.rows:
        cells = [f"<td>{escape(label)}</td>"]
        for column in table.columns:
            entry = table.entries.get((label, column))
            if entry is None:
                cells.append(f"<td>{ABSENT}</td>")
            else:
                text = escape(value_text(entry.value))
                text = f"<strong>{text}</strong>" if entry.best else text
                cells.append(f'<td>{text} <span class="n">({entry.value.n})</span></td>')
            if shows_paper(table, column):
                cells.append(f'<td class="paper">{paper_text(label, column)}</td>')
                cells.append(f'<td class="paper">{difference_to_paper(entry, label, column)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    parts = [f'<div class="protocol">{_list(table.protocol)}</div>']
    parts.append(_grid([head, under], rows))
    if table.has_pairs:
        titles = ["<th>method</th>", *(f"<th>{escape(column_title(column))}</th>" for column in table.columns)]
        body = [
            f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
            for label, texts in paired_rows(table)
        ]
        parts += [f'<p class="protocol">{escape(paired_title(table))}.</p>', _grid([titles], body)]
    return "\n".join(parts)


def _grid(head: Sequence[Sequence[str]], rows: Sequence[str]) -> str:
    top = "".join(f"<tr>{''.join(cells)}</tr>" for cells in head)
    return f'<div class="scroll"><table><thead>{top}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(plots.render(drawing.figure, "svg")).decode()
    caption = escape(drawing.caption)
    return (
        f'<figure id="{escape(drawing.name)}"><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _run_list(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        accuracy, seconds = run.last(METRIC), run.summary.get("seconds", {}).get("total")
        texts = [
            run.name,
            run.label,
            column_title(run.column),
            str(run.config["seed"]),
            str(run.summary["last"]["round"]),
            ABSENT if accuracy is None else f"{100 * accuracy:.2f}",
            ABSENT if seconds is None else f"{seconds:.0f}",
        ]
        rows.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    titles = ["run", "method", "setting", "seed", "last round", f"{METRIC} (%)", "seconds"]
    head = [f"<th>{escape(title)}</th>" for title in titles]
    return f"<h2>Runs</h2><details><summary>{len(runs)} runs</summary>{_grid([head], rows)}</details>"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of the runs below some folders."""
    parser = argparse.ArgumentParser(prog="python -m jgesr_lightning report", description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=user_path, nargs="+", metavar="RUNS", help="folder with runs, at any depth")
    parser.add_argument("--metric", default=METRIC, help=f"an accuracy in the runs' summaries ({METRIC})")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="the page (RUNS/report.html)")
    arguments = parser.parse_args(argv)
    drawn = arguments.metric.startswith("accuracy/")
    tables, collection = tables_of(arguments.folders, arguments.metric, drawn)
    drawings = draw(collection.runs, arguments.metric) if drawn else ()
    target = arguments.out or Path(arguments.folders[0]) / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page(tables, drawings, collection.runs, collection.notes))
    print(target)
    return 0

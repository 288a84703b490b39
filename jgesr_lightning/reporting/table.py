"""Prints the tables of finished runs, writes them to files, and stores the runs themselves in one small file.

``python -m jgesr_lightning table RUNS ... [--format md|csv|latex|all] [--metric M] [--reference METHOD] [--out DIR]``
``python -m jgesr_lightning table RUNS ... --store FILE [--out DIR]``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from jgesr_lightning.arguments import CommandParser, first_line
from jgesr_lightning.files import write_text
from jgesr_lightning.paths import user_folder
from jgesr_lightning.reporting.options import add_arguments
from jgesr_lightning.reporting.render import all_latex, all_markdown, csv_text
from jgesr_lightning.reporting.store import ENDINGS, store, store_file
from jgesr_lightning.reporting.tables import Table, tables_of

WRITERS: Mapping[str, tuple[str, Callable[[Sequence[Table], Sequence[str]], str]]] = {
    "md": ("table.md", all_markdown),
    "csv": ("table.csv", lambda tables, notes: csv_text(tables)),
    "latex": ("table.tex", all_latex),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the runs below some folders, and write them to files where asked."""
    parser = CommandParser("table", first_line(__doc__), "table runs/table1_small --format latex --out tables")
    add_arguments(parser)
    parser.add_argument("--format", choices=[*WRITERS, "all"], help="what is printed, or written (md)")
    parser.add_argument("--out", type=user_folder, metavar="DIR", help="write table.md, table.csv, table.tex there")
    parser.add_argument(
        "--store",
        type=store_file,
        metavar="FILE",
        help=f"write the runs, curves and graphs included, to FILE ({', '.join(ENDINGS)})",
    )
    arguments = parser.parse_args(argv)
    if arguments.store is not None and arguments.format is not None and arguments.out is None:
        parser.error("--store prints no table, so --format has nothing to say: give --out DIR for a table besides")
    wanted = arguments.format or "md"
    found = tables_of(arguments.folders, arguments.metric, arguments.reference, drawn=arguments.store is not None)
    notes = [f"note: {note}" for note in found.collection.notes]
    if arguments.store is not None:
        store(found.collection, arguments.store)
        print(f"wrote {arguments.store}: {len(found.collection.runs)} runs")
        if arguments.out is None:
            _tell(notes)
            return 0
    for kind in WRITERS if wanted == "all" else [wanted]:
        name, write = WRITERS[kind]
        text = write(found.tables, notes)
        if arguments.out is None:
            print(text)
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_text(arguments.out / name, text)
            print(f"wrote {arguments.out / name}")
    if arguments.out is not None or wanted == "csv":  # else they stand below the table
        _tell(notes)
    return 0


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)

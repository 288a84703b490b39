"""The map of a study: which method leads where, by how much over staying alone and averaging all, and who is reliable.

``python -m jgesr_lightning map RUNS ... [--rows data.kappa] [--columns channel.noise] [--metric M] [--out DIR]``
"""

from __future__ import annotations

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
from jgesr_lightning.reporting.map_grids import csv_text, latex, markdown
from jgesr_lightning.reporting.maps import BASELINES, COLUMNS, ROWS, Map, map_of
from jgesr_lightning.reporting.options import add_places
from jgesr_lightning.reporting.runs import Run
from jgesr_lightning.reporting.tables import METRIC, accuracies_only, tables_of
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.summary import higher_is_better

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
    runs = tables_of(arguments.folders, arguments.metric)
    accuracies_only(runs.metric)
    if not higher_is_better(runs.metric):
        raise ConfigError(
            f"--metric is {runs.metric!r}, of which less is better; a map shows who leads in, say, {METRIC}"
        )
    for name, key in (("--rows", arguments.rows), ("--columns", arguments.columns)):
        if wrong := _no_axis(key, runs.collection.runs):
            raise ConfigError(f"{name} is {shown(key)!r}, {wrong}")
    collection = runs.collection
    baselines = (
        BASELINES if arguments.baseline is None else list(dict.fromkeys(map(collection.label_of, arguments.baseline)))
    )
    found = map_of(collection.runs, runs.metric, arguments.rows, arguments.columns, baselines, collection.names)
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
    for note in runs.collection.notes:
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
    differing = [key for key in known if len({repr(run.condition.get(key)) for run in runs}) > 1]
    return f"{why}; the runs differ in {', '.join(differing) or 'no other setting'}"

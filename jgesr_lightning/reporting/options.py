"""Arguments that the commands on finished runs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from jgesr_lightning.paths import user_path
from jgesr_lightning.reporting.tables import METRIC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the runs are, what is shown of them and what it is compared with."""
    parser.add_argument(
        "folders",
        type=_place,
        nargs="+",
        metavar="RUNS",
        help="folder that holds runs, at any depth, or a file that `table RUNS --store FILE` wrote",
    )
    parser.add_argument("--metric", help=f"a name in the runs' summaries (default: their setting `metric`, {METRIC})")
    parser.add_argument(
        "--reference", metavar="METHOD", help="row that the others are compared with (the study's first, else jgesr)"
    )


def _place(text: str) -> str:
    return str(user_path(text))


def beside(root: str, name: str) -> Path:
    """Return where results of a folder of runs go: into it; those of a file of stored results: beside it."""
    path = user_path(root)
    return path / name if path.is_dir() else path.with_name(f"{path.name.partition('.json')[0]}_{name}")

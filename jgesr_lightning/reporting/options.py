"""Arguments that the commands on finished runs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jgesr_lightning.paths import user_path
from jgesr_lightning.reporting.tables import METRIC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the runs are, what is shown of them and what it is compared with."""
    add_places(parser)
    parser.add_argument(
        "--reference", metavar="METHOD", help="row that the others are compared with (the study's first, else jgesr)"
    )


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add where the runs are, and what is shown of them."""
    add_folders(parser)
    parser.add_argument(
        "--metric",
        help="a name in the runs' summaries, with @N behind it for the mean over the last N evaluations "
        f"(default: their setting `metric`, {METRIC})",
    )


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Add where the runs are."""
    parser.add_argument(
        "folders",
        type=user_path,
        nargs="+",
        metavar="RUNS",
        help="folder that holds runs, at any depth, or a file that `table RUNS --store FILE` wrote",
    )


def beside(roots: Sequence[Path], name: str) -> Path:
    """Return where results go: into a folder of runs, beside a file of stored results.

    Those of several, which are nobody's own, go into the folder that they all lie in.
    """
    first, *more = roots
    if more:
        places = [os.path.abspath(path.parent) for path in (first, *more)]
        return Path(os.path.relpath(os.path.commonpath(places))) / name
    return first / name if first.is_dir() else first.with_name(f"{first.name.partition('.json')[0]}_{name}")

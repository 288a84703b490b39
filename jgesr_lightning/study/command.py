"""The command line of studies: ``study table1_small [--only PATTERN] [--part i/n] [--workers n] [key=value ...]``.

Cells run each in a process of its own, and leave their folders in ``runs/<study>/``. A finished cell is not run again,
one that another study beside this one has finished is copied from there, and a stopped one goes on from its checkpoint,
so the same command is also how a study is resumed. A lock per cell lets any number of processes work on one study.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from jgesr_lightning.arguments import CommandParser, invocation
from jgesr_lightning.checks import is_count
from jgesr_lightning.config import ConfigError
from jgesr_lightning.files import write_text
from jgesr_lightning.study.cells import Cell, choose, find_study, load_study, parse_part
from jgesr_lightning.study.processes import can_fork, default_workers, training
from jgesr_lightning.study.runner import run_cells, state

FILE = "study.yaml"
"""Copy of the study's file in its folder, which tables take the order of methods from."""


def main(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run a study, or the part of it that is asked for.

    Args:
        argv: the arguments.
        run: runs the command line of a cell, ``train ...``, in that cell's process.
    """
    arguments = _parser().parse_intermixed_args(argv)
    name, all_cells = load_study(arguments.study, arguments.overrides)
    folder = all_cells[0].folder.parent
    if arguments.folder:
        print(folder)
        return 0
    cells = choose(all_cells, arguments.only, parse_part(arguments.part, os.environ))
    if arguments.list:
        for cell in cells:
            print(f"{cell.name}: {state(cell)}")
        return 0
    teller = _Teller()
    if not cells:
        teller(f"{name}: this part of the study has no cells")
        return 0
    workers = default_workers(cells) if arguments.workers is None else min(arguments.workers, len(cells))
    _refuse_more_devices(cells, workers)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, find_study(arguments.study).read_text(encoding="utf-8-sig"))
    if workers > 1:
        teller(f"{name}: {len(cells)} cells, {workers} at once")
    outcome = run_cells(cells, training(run, workers, can_fork()), teller, workers)
    teller(f"{name}: {len(outcome.finished)} of {len(cells)} cells finished")
    if outcome.finished:
        teller(f"tables: {invocation()} table {shlex.quote(str(folder))}")
    if outcome.elsewhere:
        teller(f"run by other processes: {', '.join(outcome.elsewhere)}")
    for failed, reason in outcome.failed.items():
        print(f"failed: {failed}: {reason}", file=sys.stderr)
    if outcome.stopped_by:
        print(f"stopped by {outcome.stopped_by}; the same command goes on from here", file=sys.stderr)
    return 1 if outcome.failed or outcome.stopped_by else 0


def _refuse_more_devices(cells: Sequence[Cell], workers: int) -> None:
    """Raise ConfigError where cells that run at once, with one device each, are to have several."""
    for cell in cells if workers > 1 else ():
        for key in ("devices", "num_nodes"):
            if (value := getattr(cell.config.runtime, key)) not in ("auto", 1):
                raise ConfigError(
                    f"runtime.{key} is {value} for {cell.name}; cells that run {workers} at once (--workers) have one "
                    "device each: leave out one of the two"
                )


def _parser() -> CommandParser:
    parser = CommandParser("study", "Run what is left of a study.", "study table1_small --workers 2 rounds=5")
    parser.add_argument("study", help="a YAML file, or the name of one in configs/studies/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for all cells")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells whose name matches")
    parser.add_argument("--part", metavar="i/n", help="every n-th cell from the i-th (default: the SLURM array task)")
    parser.add_argument(
        "--workers", type=_count, metavar="n",
        help="cells that run at once, one process each (default: one a core on a CPU, else one)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the cells and how far they are; run nothing")
    parser.add_argument("--folder", action="store_true", help="print the folder of its runs; run nothing")
    return parser


def _count(text: str) -> int:
    if not (is_count(text) and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; write 1 or more")
    return int(text)


class _Teller:
    """Prints lines; where nobody reads them any more, says so once on stderr and goes on there: the runs matter."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def __call__(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except OSError as error:
            if self._stream is sys.stderr:
                return
            self._stream = sys.stderr
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to be flushed goes nowhere
            self(f"stdout cannot be written ({error.strerror}); the study goes on, and tells how here")
            self(line)

"""How every command takes its arguments: help that ends with an example, mistakes in one line that name the nearest."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jgesr_lightning.checks import nearest
from jgesr_lightning.config.error import ConfigError


def program() -> str:
    """Return how this program was called, as one would type it."""
    return "jgesr" if Path(sys.argv[0]).name == "jgesr" else "python -m jgesr_lightning"


def invocation() -> str:
    """Return how to call this program once more from here, so that a printed line can be copied."""
    if program() == "jgesr":
        return called("jgesr", sys.argv[0])
    return f"{called('python', sys.executable)} -m jgesr_lightning"


def called(name: str, path: str) -> str:
    """Return `name` where the shell finds that program by it, else its path, a short one if it lies below."""
    try:
        path, here = os.path.abspath(path), os.getcwd() + os.sep
        found = shutil.which(name)
        if found is not None and os.path.abspath(found) == path:
            return name
    except OSError:  # somebody removed the current folder meanwhile: nothing to fail for
        return name
    below = path.removeprefix(here)
    return shlex.quote(below if os.sep in below else path)  # a bare name would be looked for in PATH


def first_line(text: str | None) -> str:
    """Return the first line of a module's docstring, of which ``python -OO`` leaves nothing."""
    return (text or "").partition("\n")[0]


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        name: the command; empty for the program itself.
        description: one line.
        example: what follows the program's name in a call that works; the help ends with it.
        options: those of `argparse.ArgumentParser`.

    Raises:
        ConfigError: arguments that the command does not take, in place of argparse's own end of the program.
    """

    def __init__(self, name: str, description: str, example: str, **options: Any) -> None:
        self._known: list[str] = ["--help"]
        super().__init__(
            prog=f"{program()} {name}".strip(),
            description=description,
            epilog=f"example:\n  {program()} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """See argparse; the options are noted for hints."""
        self._known += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message, the nearest option that there is, and where to read on."""
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        hint = nearest(unknown[1], self._known) if unknown else ""
        raise ConfigError(f"{message}{hint}; `{self.prog} --help` shows how it is called")

    def settings(self, arguments: Sequence[str]) -> list[str] | None:
        """Return the arguments of a command that reads ``key=value`` itself; None where help was asked for and given.

        argparse would put settings that begin with two dashes behind all others, and of two for one key the last wins.
        """
        if {"-h", "--help"} & set(arguments):
            self.print_help()
            return None
        return list(arguments)

"""Federated learning over unreliable links: run it, fetch its data, report on it.

The command line, ``python -m jgesr_lightning COMMAND ...`` (or ``jgesr COMMAND ...``).

Exit status: 0 done; 2 bad configuration or data, with one line on stderr; 1 anything else, a run that was stopped early
included. What a command needs is imported by that command: help and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jgesr_lightning.arguments import CommandParser, first_line, program
from jgesr_lightning.checks import nearest
from jgesr_lightning.config import CONFIGS, Config, ConfigError, copy_configs, find_config, load_config, to_yaml
from jgesr_lightning.paths import PathError
from jgesr_lightning.version import __version__

DEBUG = "JGESR_DEBUG"
"""Environment variable: if set, what nobody foresaw ends in a traceback."""

SETTINGS = """\
CONFIG is a YAML file, or the name of one that is shipped (mnist_s01). Settings are given as key=value or --key=value,
before or after it; of two for one key the last wins. `config CONFIG` shows every key with its value."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _open_streams()
    if argv is None:  # a program of its own: a notebook's way of drawing, inherited from it, may not even be installed
        os.environ["MPLBACKEND"] = "agg"
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a reader that went away, or a full disk, is noticed here rather than at exit
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but to take PyTorch apart, which takes seconds
        return status
    except (ConfigError, PathError) as error:
        _complain(f"error: {error}")
        return 2
    except SystemExit as ended:  # argparse, when it has shown help or the version
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        _complain("interrupted")
        if argv is None:  # whoever sits there waits for it, and to take PyTorch apart takes seconds
            _drop_output()
            os._exit(130)
        return 130
    except BrokenPipeError:  # as in `... | head`
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        _complain(f"error: {error}")
        return 1
    except Exception as error:  # a fault of the program's own
        if os.environ.get(DEBUG):
            raise
        said = " ".join(str(error).split())
        _complain(f"error: {type(error).__name__}: {said} (a fault of this program; {DEBUG}=1 shows where it happened)")
        return 1


def _open_streams() -> None:
    """Let stdout and stderr take any text: a character that their encoding lacks becomes "?", a closed one drops it."""
    # a closed descriptor is taken up first: the next file that is opened would get its number, and then its output
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # what cannot be written is reported when it is written
                stream.reconfigure(errors="replace")


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr is the last resort
        print(line, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Send what stdout still holds nowhere, if it cannot be written: the interpreter would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # also a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> int:
    try:
        os.getcwd()
    except OSError:  # PyTorch would end the process with a line on libraries of its own
        raise ConfigError("the current folder is gone; go to one that is there") from None
    parser = CommandParser("", first_line(__doc__), EXAMPLE, usage=f"{program()} COMMAND ...")
    parser.add_argument("--version", action="version", version=f"jgesr_lightning {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=ArgumentParser)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    first, *rest = arguments
    if first == "help":
        first, rest = (rest[0], ["--help"]) if rest else ("--help", [])
    if first not in COMMANDS and not first.startswith("-"):
        raise ConfigError(f"no command {first!r}{nearest(first, COMMANDS)}; known: {', '.join(COMMANDS)}")
    # the rest is the command's own to read: argparse would mix up the order of settings
    return COMMANDS[parser.parse_args([first]).command].run(rest)


def train(arguments: Sequence[str]) -> int:
    """Run the federation that a configuration describes."""
    settings = _configured("train", "Run a federation; its files go to runs/NAME.", EXAMPLE).settings(arguments)
    if settings is None:
        return 0
    _settle()
    config = configuration(settings)
    _announce_loading()
    from jgesr_lightning import experiment
    from jgesr_lightning.data import DataError
    from jgesr_lightning.failure import RunError
    from jgesr_lightning.federation import NonFiniteError
    from jgesr_lightning.run_folder import where_it_lies
    from jgesr_lightning.runtime.checkpoint import CheckpointError
    from jgesr_lightning.runtime.environment import is_first

    config = where_it_lies(config, next(filter(is_file, settings)), settings)
    try:
        result = experiment.run(config)
        # the first process's status is the run's: whoever started the others would take theirs for a crash
        return 0 if result.status == "finished" or not is_first() else 1
    except DataError as error:
        raise ConfigError(error) from None
    except (CheckpointError, NonFiniteError, RunError, OSError) as error:
        if isinstance(error, RunError) and os.environ.get(DEBUG):
            raise
        _complain(f"error: {error}")
        return 1


def _settle() -> None:
    """Put variables aside that no launcher stands behind, before PyTorch and Lightning, which read them."""
    from jgesr_lightning.runtime import environment

    try:
        line = environment.settle()
    except environment.LaunchError as error:
        raise ConfigError(error) from None
    if line:
        _complain(line)


def _announce_loading() -> None:
    """Tell whoever sits at a terminal why nothing happens for some seconds; once, whatever the number of processes."""
    from jgesr_lightning.runtime import environment

    if environment.is_first() and sys.stderr.isatty():
        _complain("loading PyTorch and Lightning ...")


def show(arguments: Sequence[str]) -> int:
    """Print a configuration with everything filled in."""
    settings = _configured(
        "config", "Print a configuration with everything filled in.", "config mnist_s01 aggregator.name=fedprox"
    ).settings(arguments)
    if settings is not None:
        print(to_yaml(configuration(settings)), end="")
    return 0


def init(arguments: Sequence[str]) -> int:
    """Copy the configurations and SLURM scripts that come with the package, to be edited."""
    parser = CommandParser(
        "init", "Copy the configurations, studies, sweeps and SLURM scripts to FOLDER/configs, to edit.", "init my_work"
    )
    parser.add_argument("folder", nargs="?", default=".", help="made where it does not exist (default: this one)")
    folder = parser.parse_args(arguments).folder
    written, kept = copy_configs(folder)
    print(f"{len(written)} files written to {os.path.join(folder, CONFIGS)}")
    if kept:
        print(f"{len(kept)} were there already and stay as they are: {', '.join(map(str, kept))}")
    return 0


def data(arguments: Sequence[str]) -> int:
    """Fetch the data set of a configuration, or one named by itself, and keep it decoded."""
    given = _configured(
        "data", "Fetch a data set, of a name or of a configuration, and keep it decoded.", "data mnist", "NAME|CONFIG"
    ).settings(arguments)
    if given is None:
        return 0
    from jgesr_lightning.data import data_root, load_dataset
    from jgesr_lightning.names import is_name, known

    sets = [argument for argument in given if is_file(argument) and is_name("data", argument)]
    if len(sets) > 1:
        raise ConfigError(f"one data set at a time, got {', '.join(sets)}")
    settings = [argument for argument in given if argument not in sets]
    named = any(setting.removeprefix("--").startswith("data.name=") for setting in settings)
    if sets or (named and not any(map(is_file, settings))):
        config = load_config(None, [*(f"data.name={name}" for name in sets), *settings])
    else:
        for file in filter(is_file, given):  # a name that nobody knows may be meant for a data set's
            find_config(file, others=known("data"))
        config = configuration(given)
    try:
        found = load_dataset(config.data.name, config.data.root, verify=config.data.verify, label=config.data.label)
    except ValueError as error:  # no data, or a function that cannot be called for them
        raise ConfigError(error) from None
    sizes = found.train_inputs.shape[1:]
    shape = " x ".join(map(str, sizes)) if len(sizes) > 1 else f"{sizes[0]} feature{'s' if sizes[0] > 1 else ''}"
    print(
        f"{found.name}: {len(found.train_inputs)} training and {len(found.test_inputs)} test samples of {shape}, "
        f"{len(found.classes)} classes; data folder {data_root(config.data.root)}"
        + (f"; {found.left_out}" if found.left_out else "")
    )
    return 0


def study(arguments: Sequence[str]) -> int:
    """Run the cells of a study that are not finished yet, each by this program's own `train`."""
    from jgesr_lightning.study import command

    return command.main(arguments, run=main)


def elsewhere(place: str, loads: bool = False) -> Callable[[Sequence[str]], int]:
    """Return the command that stands in another module, which is imported when it runs.

    Args:
        place: ``module:function``, the module as seen from this package.
        loads: whether that takes seconds, PyTorch and Lightning being imported by it.
    """

    def run(arguments: Sequence[str]) -> int:
        if loads and not {"-h", "--help"} & set(arguments):
            _announce_loading()
        module, _, function = place.partition(":")
        status: int = getattr(importlib.import_module(f"jgesr_lightning.{module}"), function)(arguments)
        return status

    return run


def configuration(arguments: Sequence[str]) -> Config:
    """Return the configuration of one file and ``key=value`` arguments, in any order."""
    files = [argument for argument in arguments if is_file(argument)]
    settings = [argument for argument in arguments if not is_file(argument)]
    if not files:
        raise ConfigError("name a configuration, such as mnist_s01 or configs/mnist_s01.yaml")
    if len(files) > 1:
        raise ConfigError(f"one configuration at a time, got {', '.join(files)}; settings are written key=value")
    return load_config(files[0], settings)


def is_file(argument: str) -> bool:
    """Return whether an argument names a configuration rather than a setting."""
    key, equals, _ = argument.partition("=")
    return not argument.startswith("-") and (not equals or "/" in key)


def _configured(name: str, description: str, example: str, what: str = "CONFIG") -> CommandParser:
    """Return the parser of a command that takes a configuration and settings."""
    return CommandParser(
        name, f"{description}\n\n{SETTINGS}", example, usage=f"{program()} {name} {what} [key=value ...]"
    )


@dataclass(frozen=True)
class Command:
    """One command: a function that takes its arguments and returns the exit status, and a line of what it is for.

    What it needs is imported when it runs; a command with options has a `CommandParser` of its own.
    """

    run: Callable[[Sequence[str]], int]
    summary: str


EXAMPLE = "train mnist_s01 aggregator.name=fedavg seed=3 rounds=5"
COMMANDS = {
    "train": Command(train, "run a federation; its results go to runs/NAME"),
    "config": Command(show, "print the configuration with everything filled in"),
    "init": Command(init, "copy the configurations and SLURM scripts, to edit"),
    "data": Command(data, "fetch a data set (mnist, cifar10) and keep it decoded"),
    "table": Command(elsewhere("reporting.table:main"), "tables from the runs in folders"),
    "figures": Command(elsewhere("reporting.figures:main"), "figures from the runs in folders"),
    "report": Command(elsewhere("reporting.report:main"), "one HTML page with both"),
    "map": Command(elsewhere("reporting.map:main"), "which method leads where, over two settings of a study"),
    "score": Command(elsewhere("reporting.score:main"), "how far runs lie from the paper's numbers, a row a reading"),
    "export": Command(elsewhere("trained.export:main", loads=True), "a run's models as safetensors files, with a card"),
    "predict": Command(
        elsewhere("trained.scoring:predict_main", loads=True), "classes of new samples, by a client's model"
    ),
    "evaluate": Command(
        elsewhere("trained.scoring:evaluate_main", loads=True),
        "accuracy of each client's model, on new data or its own",
    ),
    "attach": Command(
        elsewhere("trained.attach:main", loads=True), "a new client: trained, joined to the learned graph, scored"
    ),
    "study": Command(study, "run what is left of a study (table1_small, or a file)"),
}
"""Every command, in the order in which help lists them; a new one is a line here."""

"""A study: methods x data sets x noise levels x missing rates x seeds, each combination an ordinary run.

``python -m jgesr_lightning study table1_small [--only PATTERN] [--part i/n] [--list] [key=value ...]``

Cells run one after another, each in a process of its own, and leave their folders in ``runs/<study>/``. A finished cell
is not run again, one that another study beside this one has finished is copied from there, and a stopped one goes on
from its checkpoint, so the same command is also how a study is resumed. A lock per cell lets any number of processes
work on one study.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jgesr_lightning.checks import nearest
from jgesr_lightning.config import CONFIGS, Config, ConfigError, load_config, parse_overrides, to_dict
from jgesr_lightning.identity import condition, digest, flatten, seed_of
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.timing import duration

KEYS = ("base", "settings", "methods", "data", "noise", "missing_rate", "seeds")
OWN = ("name", "resume", "seed", "data.name", "channel.noise", "channel.missing_rate", "aggregator.name")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        name: of its folder, readable and unique within the study.
        base: configuration file that it starts from.
        overrides: ``key=value`` arguments on top of it, `name` and `output_dir` among them.
        config: the resolved and checked configuration.
    """

    name: str
    base: str
    overrides: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.folder

    def summary(self) -> dict[str, Any]:
        """Return the run's summary, empty where there is none that can be read."""
        return _summary(self.folder)

    def is_finished(self) -> bool:
        """Whether the run is done, with these very settings."""
        summary = self.summary()
        if summary.get("status") != "finished":
            return False
        return _identity(summary["config"]) == _identity(to_dict(self.config))


def load_study(name: str | Path, overrides: Sequence[str] = ()) -> tuple[str, list[Cell]]:
    """Return a study's name and its cells, every configuration checked.

    The file holds ``base`` (a configuration file), ``settings`` (shared by all cells), ``methods`` (label -> the
    method's settings; `name` where the label is not the method's name; dotted keys set anything else), ``data`` (names,
    or name -> settings), ``noise``, ``missing_rate`` and ``seeds``. Cells are ordered by seed first: a study that is
    cut short has whole comparisons.

    Args:
        name: a YAML file, or the bare name of one in ``configs/studies/``.
        overrides: ``key=value`` for all cells; `output_dir` is the folder that the study's own folder goes into.

    Raises:
        ConfigError: the file, or a cell's configuration, is wrong; one line.
    """
    path = find_study(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a study holds the keys {', '.join(KEYS)}")
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key}{nearest(str(key), KEYS)}; known: {', '.join(KEYS)}")
    for key in ("base", "methods"):
        if key not in content:
            raise ConfigError(f"{path}: {key} is missing")
    parse_overrides(overrides)
    given = dict(text.removeprefix("--").split("=", 1) for text in overrides)
    for key in OWN:
        if key in given:
            raise ConfigError(f"{key} cannot be set for all cells of a study: each cell has its own (--only chooses)")
    output = Path(given.pop("output_dir", "runs")) / path.stem
    shared = _dotted(content.get("settings"))
    axes = (
        _listed(path, content, "seeds", [0]),
        _mapping(path, content, "data", ["mnist"]).items(),
        _listed(path, content, "noise", [0.1]),
        _listed(path, content, "missing_rate", [0.0]),
        _mapping(path, content, "methods", []).items(),
    )
    several_rates = len(axes[3]) > 1 or axes[3] != [0.0]
    loaded: dict[tuple[str, str], Config] = {}  # reading files takes its time, and only these two choose settings
    cells = []
    for seed, (data, data_settings), noise, missing, (label, method) in itertools.product(*axes):
        rate = f"_m{missing}" if several_rates else ""
        cell = f"{data}_s{noise}{rate}_{label}_seed{seed}"
        values = {
            "data.name": data,
            "aggregator.name": method.get("name", label),
            **shared,
            **_dotted(data_settings),
            **{(key if "." in key else f"aggregator.{key}"): value for key, value in method.items() if key != "name"},
            **given,
        }
        own = {
            "channel.noise": noise, "channel.missing_rate": missing, "seed": seed, "name": cell,
            "output_dir": str(output),
        }  # fmt: skip
        arguments = tuple(f"{key}={_text(value)}" for key, value in {**values, **own}.items())
        if (data, label) not in loaded:
            loaded[data, label] = load_config(content["base"], arguments)
        try:
            config = loaded[data, label]
            channel = config.channel.replace(noise=float(noise), missing_rate=float(missing))
            config = config.replace(channel=channel, seed=seed, name=cell)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        cells.append(Cell(cell, str(content["base"]), arguments, config))
    names = [cell.name for cell in cells]
    twice = next((cell for cell in names if names.count(cell) > 1), None)
    if twice:
        raise ConfigError(f"{path}: {twice} comes twice")
    return path.stem, cells


def find_study(name: str | Path) -> Path:
    """Return the file of a study: a path, or the bare name of one in ``configs/studies/``."""
    folders = [CONFIGS / "studies", Path(__file__).parent.parent / CONFIGS / "studies"]
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise ConfigError(f"no study {name}{nearest(str(name), known)}; known: {', '.join(known)}")


def choose(cells: Sequence[Cell], only: Sequence[str] = (), part: tuple[int, int] = (1, 1)) -> list[Cell]:
    """Return the cells whose name matches one of the patterns, and of these every n-th, from the i-th.

    Args:
        cells: all cells.
        only: patterns with ``*`` and ``?``, or plain pieces of names; none: all cells.
        part: (i, n), i from 1.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    patterns = [pattern if set(pattern) & set("*?[") else f"*{pattern}*" for pattern in only]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(cell.name, pattern) for cell in cells):
            raise ConfigError(f"--only {pattern.strip('*')} matches no cell; --list shows them")
    matching = [c for c in cells if not patterns or any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]
    return matching[part[0] - 1 :: part[1]]


def parse_part(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (i, n) from the text ``i/n``, else from a SLURM array task's variables, else (1, 1)."""
    if text is not None:
        head, _, tail = text.partition("/")
        if not (head.isdecimal() and tail.isdecimal() and 1 <= int(head) <= int(tail)):
            raise ConfigError(f"--part is {text!r}; it must be i/n with i from 1 to n, such as 2/4")
        return int(head), int(tail)
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return 1, 1
    task, first = int(environment["SLURM_ARRAY_TASK_ID"]), int(environment.get("SLURM_ARRAY_TASK_MIN", 0))
    step = int(environment.get("SLURM_ARRAY_TASK_STEP", 1))
    return (task - first) // step + 1, int(environment.get("SLURM_ARRAY_TASK_COUNT", 1))


@dataclass
class Outcome:
    """What became of the cells that were asked for.

    Attributes:
        finished: names of the cells that are done, now or before.
        failed: name -> what went wrong.
        elsewhere: names of the cells that other processes are running.
        stopped_by: name of the signal that ended the study early, or None.
    """

    finished: list[str]
    failed: dict[str, str]
    elsewhere: list[str]
    stopped_by: str | None = None


def run_cells(
    cells: Sequence[Cell], command: Callable[[Cell], Sequence[str]] | None = None, say: Callable[[str], None] = print
) -> Outcome:
    """Run the cells that are not finished, one after another.

    Args:
        cells: in the order in which they run.
        command: gives the program that runs a cell; None: ``python -m jgesr_lightning train``.
        say: takes a line of progress.
    """
    command = command or train_command
    outcome = Outcome([], {}, [])
    starts: list[float] = []  # what a cell took beyond its rounds: imports, data, files
    with StopRequest() as stop:
        for place, cell in enumerate(cells, 1):
            if stop:
                break
            head = f"[{place}/{len(cells)}] {cell.name}"
            with _claim(cell) as lock:
                if lock is None:
                    outcome.elsewhere.append(cell.name)
                    say(f"{head}: another process runs it")
                    continue
                if cell.is_finished():
                    outcome.finished.append(cell.name)
                    say(f"{head}: finished before, {_result(cell)}")
                    continue
                if source := _copy_of_equal(cell):
                    outcome.finished.append(cell.name)
                    say(f"{head}: copied from {source}, {_result(cell)}")
                    continue
                say(f"{head}: running ({_log(cell)})")
                start = time.monotonic()
                status = _run(cell, command(cell), lock, stop)
                seconds = time.monotonic() - start
            if status == 0 and cell.is_finished():
                outcome.finished.append(cell.name)
                starts.append(max(0.0, seconds - _seconds(cell)))
                left = _seconds_left(cells, place, sum(starts) / len(starts))
                more = f"; about {duration(left)} left" if left else ""
                say(f"{head}: {_result(cell)}, {duration(seconds)}{more}")
            elif not stop:
                reason = _reason(_log(cell))
                if cell.summary().get("status") == "finished":  # with other settings, and resuming refused to mix them
                    reason += f"; to run the cell anew, remove {cell.folder}"
                outcome.failed[cell.name] = f"exit status {status}: {reason}"
                say(f"{head}: failed, exit status {status}: {reason}")
        outcome.stopped_by = stop.received
    return outcome


def train_command(cell: Cell) -> list[str]:
    """Return the program that runs a cell, or goes on with it."""
    return [sys.executable, "-m", "jgesr_lightning", "train", cell.base, *cell.overrides, "resume=auto"]


def _run(cell: Cell, command: Sequence[str], lock: int, stop: StopRequest) -> int:
    """Run a cell's program to its end, output to its log; a stop signal is passed on once, and its end awaited."""
    log = _log(cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        # A session of its own: Ctrl-C reaches it through us alone. It keeps the lock should we be killed.
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=(lock,),
            start_new_session=True,
        )  # fmt: skip
        passed_on = False
        try:
            while (status := child.poll()) is None:
                if stop.received and not passed_on:
                    child.send_signal(signal.Signals[stop.received])
                    passed_on = True
                time.sleep(POLL_SECONDS)
        except BaseException:  # a second Ctrl-C
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started for its other devices
            child.wait()
            raise
    return status


@contextmanager
def _claim(cell: Cell) -> Iterator[int | None]:
    """Yield the descriptor of the cell's lock, held until the block and all processes it was handed to end; or None."""
    path = cell.folder.parent / ".locks" / cell.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield file.fileno()


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _log(cell: Cell) -> Path:
    return cell.folder.parent / "logs" / f"{cell.name}.log"


def _reason(path: Path) -> str:
    """Return the last line of a log that names an error, else its last line."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])


def _result(cell: Cell) -> str:
    value = cell.summary().get("last", {}).get("accuracy/received")
    return "no accuracy measured" if value is None else f"{100 * value:.2f} % (accuracy/received)"


def _seconds(cell: Cell) -> float:
    return float(cell.summary().get("seconds", {}).get("total", 0.0))


def _seconds_left(cells: Sequence[Cell], place: int, start: float) -> float:
    """Return the estimated time for the cells after `place`, from what finished ones on the same data took.

    `start` is what each takes beyond its rounds.
    """
    taken: dict[str, list[float]] = {}
    waiting = []
    for number, cell in enumerate(cells, 1):
        if cell.summary().get("status") == "finished":
            taken.setdefault(cell.config.data.name, []).append(_seconds(cell))
        elif number > place:
            waiting.append(cell)
    every = [seconds for values in taken.values() for seconds in values]
    alike = [taken.get(cell.config.data.name, every) for cell in waiting]
    return sum(start + sum(values) / len(values) for values in alike)


def _copy_of_equal(cell: Cell) -> Path | None:
    """Copy the cell from a study beside this one that has finished it; return that folder, or None without one.

    All settings have to be equal, but for the names of folders and the choice of devices. A checkpoint stays behind.
    """
    if cell.folder.exists():
        return None
    wanted = _settings(to_dict(cell.config))
    for path in sorted(cell.folder.parent.parent.glob("*/*/summary.json")):
        summary = _summary(path.parent)
        config = summary.get("config")
        if summary.get("status") == "finished" and isinstance(config, dict) and _settings(config) == wanted:
            unfinished = cell.folder.with_name(f".{cell.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(path.parent, unfinished, ignore=shutil.ignore_patterns("checkpoint", "wandb*", "figures"))
            unfinished.rename(cell.folder)
            return path.parent
    return None


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("name", "output_dir", "resume", "data.root", "runtime.devices", "runtime.num_nodes")
    return {key: value for key, value in flatten(_as_stored(config)).items() if key not in left_out}


def _identity(config: Mapping[str, Any]) -> str:
    stored = _as_stored(config)
    return digest({"condition": condition(stored), "seed": seed_of(stored)}, 32)


def _as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as ``summary.json`` gives them back: lists for tuples."""
    stored: dict[str, Any] = json.loads(json.dumps(config))
    return stored


def _dotted(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _listed(path: Path, content: Mapping[str, Any], key: str, default: list[Any]) -> list[Any]:
    values = content.get(key, default)
    values = values if isinstance(values, list) else [values]
    if not values or any(isinstance(value, (dict, list)) or value is None for value in values):
        raise ConfigError(f"{path}: {key} must be a list of numbers")
    return values


def _mapping(path: Path, content: Mapping[str, Any], key: str, default: list[Any]) -> dict[str, dict[str, Any]]:
    """Return name -> settings, from a mapping or a plain list of names."""
    values = content.get(key, default)
    names = values if isinstance(values, (list, dict)) else [values]
    wrong = not names or any(isinstance(name, (list, dict)) or name is None for name in names)
    found = names if isinstance(names, dict) else {} if wrong else dict.fromkeys(names)
    if wrong or not all(value is None or isinstance(value, dict) for value in found.values()):
        raise ConfigError(f"{path}: {key} must be a list of names, or name: {{settings}}")
    return {str(name): value or {} for name, value in found.items()}


def _text(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _state(cell: Cell) -> str:
    summary = cell.summary()
    if cell.is_finished():
        return f"finished, {_result(cell)}"
    if not summary:
        return "not begun"
    if summary.get("status") == "finished":
        return "finished with other settings"
    return f"{summary.get('status')} after round {summary.get('rounds_done')} of {summary.get('rounds')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study, or the part of it that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m jgesr_lightning study", description=__doc__.splitlines()[0])
    parser.add_argument("study", help="a YAML file, or the name of one in configs/studies/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for all cells")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells whose name matches")
    parser.add_argument("--part", metavar="i/n", help="every n-th cell from the i-th (default: the SLURM array task)")
    parser.add_argument("--list", action="store_true", help="show the cells and how far they are; run nothing")
    parser.add_argument("--folder", action="store_true", help="print the folder of its runs; run nothing")
    arguments = parser.parse_intermixed_args(argv)
    name, all_cells = load_study(arguments.study, arguments.overrides)
    if arguments.folder:
        print(all_cells[0].folder.parent)
        return 0
    cells = choose(all_cells, arguments.only, parse_part(arguments.part, os.environ))
    if arguments.list:
        for cell in cells:
            print(f"{cell.name}: {_state(cell)}")
        return 0
    if not cells:
        print(f"{name}: this part of the study has no cells")
        return 0
    outcome = run_cells(cells, say=lambda line: print(line, flush=True))
    folder = cells[0].folder.parent
    print(f"{name}: {len(outcome.finished)} of {len(cells)} cells finished")
    print(f"tables: python -m jgesr_lightning table {folder}")
    if outcome.elsewhere:
        print(f"run by other processes: {', '.join(outcome.elsewhere)}")
    for failed, reason in outcome.failed.items():
        print(f"failed: {failed}: {reason}", file=sys.stderr)
    if outcome.stopped_by:
        print(f"stopped by {outcome.stopped_by}; the same command goes on from here", file=sys.stderr)
    return 1 if outcome.failed or outcome.stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())

"""Running the cells of a study that are not finished, some at once, each in a process of its own."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from jgesr_lightning.config import to_dict
from jgesr_lightning.files import InUseError, held_since, locked
from jgesr_lightning.identity import digest, protocol
from jgesr_lightning.run_folder import changed_code
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.study.beside import Summaries, copy_of_equal, seconds_of
from jgesr_lightning.study.cells import Cell
from jgesr_lightning.study.processes import Child, Place, Starter
from jgesr_lightning.timing import duration

POLL_SECONDS = 0.05


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


@dataclass
class _Running:
    cell: Cell
    head: str
    child: Child
    held: ExitStack
    locks: list[int]
    slot: int
    start: float
    logged: int
    told: bool = False


def run_cells(cells: Sequence[Cell], starter: Starter, say: Callable[[str], None] = print, workers: int = 1) -> Outcome:
    """Run the cells that are not finished, and return when all have ended.

    A stop signal is passed on to the cells that run, once, and their end awaited.

    Args:
        cells: in the order in which they run.
        starter: starts a cell's process; see `jgesr_lightning.study.processes`.
        say: takes a line of progress.
        workers: how many run at once.
    """
    return _Runner(cells, starter, say, workers).run()


class _Runner:
    def __init__(self, cells: Sequence[Cell], starter: Starter, say: Callable[[str], None], workers: int) -> None:
        self.cells = cells
        self.starter = starter
        self.say = say
        self.workers = workers
        self.outcome = Outcome([], {}, [])
        self.waiting = deque(enumerate(cells, 1))
        self.passed: list[tuple[int, Cell]] = []  # others hold them
        self.running: list[_Running] = []
        self.starts: list[float] = []  # what a cell took beyond its rounds: imports, data, files
        self.summaries = Summaries()
        self.estimate = Estimate()

    def run(self) -> Outcome:
        with StopRequest("stopping the cells that run; Ctrl-C again: at once") as stop:
            try:
                while self.waiting and not stop:
                    self._run_waiting(stop)
                    self.waiting.extend(self._let_go())
            except BaseException:  # a second Ctrl-C
                for one in self.running:
                    _kill(one.child)
                raise
        for _, cell in self.passed:  # of these many have ended meanwhile
            (self.outcome.finished if cell.is_finished() else self.outcome.elsewhere).append(cell.name)
        if len(self.outcome.finished) < len(self.cells):
            self.outcome.stopped_by = stop.received
        return self.outcome

    def _run_waiting(self, stop: StopRequest) -> None:
        """Run the cells that wait, and return when none runs."""
        while self.running or (self.waiting and not stop):
            while self.waiting and not stop and len(self.running) < self.workers:
                self._begin(*self.waiting.popleft())
            for one in list(self.running):
                self._look_after(one, stop)
            if self.running:
                time.sleep(POLL_SECONDS)

    def _let_go(self) -> list[tuple[int, Cell]]:
        """Return the cells that others held, and left unfinished; or they had only looked whether anybody runs them."""
        free = [one for one in self.passed if held_since(lock_of(one[1])) is None and not one[1].is_finished()]
        self.passed = [one for one in self.passed if one not in free]
        return free

    def _begin(self, place: int, cell: Cell) -> None:
        """Start a cell, unless there is nothing to do; one that cannot be started has failed, and the others run."""
        head = f"[{place}/{len(self.cells)}] {cell.name}"
        try:
            with ExitStack() as held:
                lock = held.enter_context(locked(lock_of(cell)))
                if done := self._done(cell):
                    self.outcome.finished.append(cell.name)
                    self.say(f"{head}: {done}, {result(cell)}")
                else:
                    self._start(cell, head, lock, held)
        except InUseError:
            self.passed.append((place, cell))
            self.say(f"{head}: another process runs it")
        except OSError as error:
            self.outcome.failed[cell.name] = str(error)
            self.say(f"{head}: failed, {error}")

    def _start(self, cell: Cell, head: str, lock: int | None, held: ExitStack) -> None:
        """Start a cell's process, which takes over what is `held`."""
        if damage := cell.damage():
            self.say(f"{head}: damaged, {damage}; it is run again")
        self.say(f"{head}: running ({log_of(cell)})")
        log_of(cell).parent.mkdir(parents=True, exist_ok=True)
        slot = min(set(range(self.workers)) - {one.slot for one in self.running})
        # a copy, because what made the lock lets go of its own descriptor in a forked process
        locks = [] if lock is None else [os.dup(lock)]
        for copy in locks:
            held.callback(os.close, copy)
        foreign = [copy for one in self.running for copy in one.locks]
        logged = log_of(cell).stat().st_size if log_of(cell).is_file() else 0  # by earlier attempts
        child = self.starter(cell, Place(log_of(cell), locks, slot, foreign))
        # from here on: what the first one imports for all does not count
        self.running.append(_Running(cell, head, child, held.pop_all(), locks, slot, time.monotonic(), logged))

    def _done(self, cell: Cell) -> str:
        """Return why there is nothing to run, or an empty string."""
        if cell.is_finished():
            changed = changed_code(cell.summary().get("code"), to_dict(cell.config))
            how = f", with another {', '.join(changed)}: remove {cell.folder} to have it run again" if changed else ""
            return f"finished before{how}"
        source = copy_of_equal(cell, self.summaries)
        return f"copied from {source}" if source else ""

    def _look_after(self, one: _Running, stop: StopRequest) -> None:
        if stop.received and not one.told:
            one.told = True
            _send(one.child, signal.Signals[stop.received])
        status = one.child.poll()
        if status is None:
            return
        self.running.remove(one)
        one.held.close()
        cell, head, seconds = one.cell, one.head, time.monotonic() - one.start
        if status == 0 and cell.is_finished():
            self.outcome.finished.append(cell.name)
            self.starts.append(max(0.0, seconds - seconds_of(cell.summary())))
            left = self._seconds_left()
            more = f"; about {duration(left)} left" if left else ""
            self.say(f"{head}: {result(cell)}, {duration(seconds)}{more}")
        elif not stop:
            reason = f"{_ending(status)}: {_reason(log_of(cell), one.logged)}"
            if cell.summary().get("status") == "finished":  # with other settings, and resuming refused to mix them
                reason += f"; to run the cell anew, remove {cell.folder}"
            self.outcome.failed[cell.name] = reason
            self.say(f"{head}: failed, {reason}")

    def _seconds_left(self) -> float:
        """Return the estimated time for the cells that run and those to come, from what finished ones took.

        Cells that other processes hold run beside ours, and whoever runs them takes of those to come, too.
        """
        done = {cell.name: self.summaries.finished(cell.folder) for cell in self.cells}
        for cell in self.cells:
            if (summary := done[cell.name]) is not None:
                self.estimate.note(cell, summary["seconds"])
        start, now = sum(self.starts) / len(self.starts), time.monotonic()
        of = self.estimate.of
        running = [max(0.0, start + of(one.cell) - (now - one.start)) for one in self.running]
        left = [cell for _, cell in (*self.waiting, *self.passed) if done[cell.name] is None]
        held = {cell.name: at for cell in left if (at := held_since(lock_of(cell))) is not None}
        beside = [max(0.0, start + of(cell) - (time.time() - held[cell.name])) for cell in left if cell.name in held]
        coming = [start + of(cell) for cell in left if cell.name not in held]
        return _span([*running, *beside, *[0.0] * (self.workers - len(running))], coming)


class Estimate:
    """How long the cells to come will take: seconds of finished ones, by kind.

    What a cell takes hangs on its data first, then on all settings that a table's methods share (how much data, how
    many rounds), then on its method: the finest kind of which any has finished tells.
    """

    def __init__(self) -> None:
        self._taken: dict[Hashable, list[float]] = {}
        self._noted: set[str] = set()
        self._kinds: dict[str, tuple[Hashable, ...]] = {}

    def note(self, cell: Cell, seconds: float) -> None:
        """Take note of what a finished cell took, once."""
        if cell.name not in self._noted:
            self._noted.add(cell.name)
            for kind in self.kinds(cell):
                self._taken.setdefault(kind, []).append(seconds)

    def of(self, cell: Cell) -> float:
        """Return what a cell will take; nothing, where no cell has finished yet."""
        known = next((self._taken[kind] for kind in self.kinds(cell) if kind in self._taken), [0.0])
        return sum(known) / len(known)

    def kinds(self, cell: Cell) -> tuple[Hashable, ...]:
        """Return a cell's kinds, the finest first; they are worked out once."""
        if cell.name not in self._kinds:
            shared = digest(protocol(to_dict(cell.config)), 32)
            data, method = cell.config.data.name, cell.config.aggregator.name
            self._kinds[cell.name] = ((data, shared, method), (data, shared), (data, method), (data,), ())
        return self._kinds[cell.name]


def result(cell: Cell) -> str:
    """Return the number that a finished cell's line leads with."""
    metric = cell.config.metric
    value = cell.summary().get("last", {}).get(metric)
    return f"{100 * value:.2f} % ({metric})" if isinstance(value, (int, float)) else f"no {metric} measured"


def state(cell: Cell) -> str:
    """Return how far a cell is, in words."""
    if damage := cell.damage():
        return f"damaged, {damage}; it is run again"
    summary = cell.summary()
    if cell.is_finished():
        return f"finished, {result(cell)}"
    if not summary:
        return "not begun"
    status = summary.get("status")
    if status == "finished":
        return "finished with other settings"
    if status == "running" and held_since(lock_of(cell)) is None:
        status = "broken off"
    return f"{status} after round {summary.get('rounds_done')} of {summary.get('rounds')}"


def log_of(cell: Cell) -> Path:
    """Return the file that takes a cell's output."""
    return cell.folder.parent / "logs" / f"{cell.name}.log"


def lock_of(cell: Cell) -> Path:
    """Return the file whose lock whoever runs a cell holds."""
    return cell.folder.parent / ".locks" / cell.name


def _span(busy: Sequence[float], coming: Sequence[float]) -> float:
    """Return the time until all is done: whoever is free first takes the next of what is to come.

    Args:
        busy: how long each of those who work has still to do.
        coming: how long each of what is to come takes, in its order.

    >>> _span([5.0, 0.0], [2.0, 2.0]), _span([5.0, 0.0, 0.0], [2.0, 4.0, 3.0])
    (5.0, 5.0)
    """
    ends = sorted(busy)
    for seconds in coming:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def _send(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number)  # not reaped yet, so its number is nobody else's


def _kill(child: Child) -> None:
    """End a process with those that it started for its other devices; one that leads no group yet has none."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on a Mac, where it has just ended
            kill(child.pid, signal.SIGKILL)


def _ending(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _reason(path: Path, logged: int) -> str:
    """Return the last line that names an error in a log beyond its first `logged` bytes, else its last line."""
    text = path.read_bytes()[logged:].decode(errors="replace") if path.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])

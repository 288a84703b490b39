"""Starting a cell: a fork of this process, which has done the imports once, or a program of its own.

Fork is safe where the parent imports and does nothing else, as on the command line: no tensor is computed, so there are
no threads of torch's to lose, and CUDA is never asked anything. Where a program has called us, that may be otherwise:
`can_fork` finds out. A cell's results are the same either way: it has the same command line, environment and number of
threads; only its imports are done anew.
"""

from __future__ import annotations

import _thread
import glob
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from jgesr_lightning.runtime.cores import cores
from jgesr_lightning.runtime.signals import STOP_SIGNALS
from jgesr_lightning.study.cells import Cell

CAN_FORK = sys.platform.startswith("linux")  # on a Mac, its own libraries may crash in a forked process
PROBE_SECONDS = 1.0
"""How long to wait until threads have ended that end before a fork."""


class Child(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""


@dataclass(frozen=True)
class Place:
    """Where a cell's process stands among those that run at once.

    Attributes:
        log: file that takes its output.
        locks: descriptor of the cell's lock, which the process holds as long as it lives; none without locks.
        slot: number among those that run at once, from 0.
        foreign: descriptors of other cells' locks, which are none of its business.
    """

    log: Path
    locks: Sequence[int] = ()
    slot: int = 0
    foreign: Sequence[int] = ()


Starter = Callable[[Cell, Place], Child]


def can_fork() -> bool:
    """Whether a fork of this process has all that a cell needs.

    Of all threads a fork has the one alone that forked. Libraries that provide for it end theirs before a fork and
    start them anew (numpy's BLAS, whose threads are there from its import on); so one that is still there after a fork
    would be missing. OpenMP's are, once torch has computed on several: a forked cell would wait for them for ever.
    Threads of the caller's Python (a progress bar's, a test runner's) do not count: no cell waits for those. And CUDA
    does not work in a fork once it was asked anything, its number of devices included.
    """
    if not CAN_FORK:
        return False
    probe, end = Forked(lambda: int(_cuda_was_asked())), time.monotonic() + PROBE_SECONDS
    while probe.poll() is None or len(os.listdir("/proc/self/task")) > 1 + _thread._count():  # listed a moment longer
        if time.monotonic() > end:
            probe.kill()
            return False
        time.sleep(0.002)
    return probe.poll() == 0


def _cuda_was_asked() -> bool:
    """Whether CUDA was asked anything by the process that this one is a fork of."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and has_gpu() and bool(cuda._is_in_bad_fork())


def programs(
    command: Callable[[Cell], Sequence[str]], environment: Callable[[Place], Mapping[str, str]] | None = None
) -> Starter:
    """Return what starts a cell as the program that `command` gives, in an environment of its own if there is one."""

    def start(cell: Cell, place: Place) -> Child:
        with place.log.open("a") as output:
            # a session of its own: Ctrl-C reaches it through us alone
            return subprocess.Popen(
                command(cell), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                pass_fds=tuple(place.locks), start_new_session=True,
                env=None if environment is None else environment(place),
            )  # fmt: skip

    return start


def training(main: Callable[[Sequence[str]], int], workers: int, fork: bool = CAN_FORK) -> Starter:
    """Return what starts a cell as ``train`` would run it.

    Of cells that share the machine each has one process and one thread: what comes out does not depend on how many
    share it, and is what ``train`` gives with one process a core. (Sums differ in their last bits by threads.)

    Args:
        main: runs a command line and returns its exit status; called in the cell's process.
        workers: how many cells run at once.
        fork: whether cells are forks of this process, see `can_fork`; else programs of their own, without `main`.
    """
    extra = ["resume=auto", *(["runtime.devices=1"] if workers > 1 else [])]
    devices = visible_gpus(os.environ)

    def environment(place: Place) -> dict[str, str]:
        own = dict(os.environ)
        if workers > 1 and len(devices) > 1:
            own["CUDA_VISIBLE_DEVICES"] = devices[place.slot % len(devices)]
        if "WANDB_SWEEP_ID" not in own:
            own.pop("WANDB_RUN_ID", None)  # all cells would be one run
        return own

    def anew(place: Place) -> dict[str, str]:
        here = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what a fork could import
        return {**({"OMP_NUM_THREADS": "1"} if workers > 1 else {}), **environment(place), **here}

    if not fork:
        program = [sys.executable, "-m", "jgesr_lightning"]
        return programs(lambda cell: [*program, *train_arguments(cell, extra)], anew)

    def start(cell: Cell, place: Place) -> Child:
        warm(wandb=cell.config.logging.wandb)
        scratch = TemporaryDirectory(prefix="jgesr-", ignore_cleanup_errors=True)
        arguments = train_arguments(cell, extra)

        def train() -> int:
            _disguise(arguments, place, {**environment(place), "TMPDIR": scratch.name})
            if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
                import torch

                torch.set_num_threads(1)
            status = main(arguments)
            sys.stdout.flush()
            return status

        return Forked(train, scratch)

    return start


def train_arguments(cell: Cell, extra: Iterable[str]) -> list[str]:
    """Return the command line that runs a cell, or goes on with it."""
    return ["train", cell.base, *cell.overrides, *extra]


def warm(wandb: bool) -> None:
    """Import all that a run needs, and do nothing with it; the second time costs nothing."""
    import jgesr_lightning.experiment

    if wandb:
        import jgesr_lightning.reporting.plots  # noqa: F401


class Forked:
    """A fork of this process that runs an action and ends with the status that it returns.

    What libraries leave to be tidied up at a program's end stays: a fork ends without. So it has a folder of its own
    for temporary files, `scratch`, which it removes at its end, or this process does, for one that was killed.
    """

    def __init__(self, action: Callable[[], int], scratch: TemporaryDirectory[str] | None = None) -> None:
        self._scratch = scratch
        self._process = multiprocessing.get_context("fork").Process(target=self._work, args=(action,))
        # a stop signal waits until the child has its own way of taking it
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python warns of any thread, those of BLAS included
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _work(self, action: Callable[[], int]) -> None:
        os.setsid()  # a session of its own: Ctrl-C reaches it through us alone
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has hang-ups ignored
                signal.signal(number, signal.SIG_DFL)  # also for Ctrl-C: until the run takes it, nothing is lost
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            sys.exit(action())
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""
        status = self._process.exitcode
        if status is not None and self._scratch is not None:
            self._scratch.cleanup()
        return status

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self._process.kill()
        self._process.join()


def _disguise(arguments: Sequence[str], place: Place, environment: Mapping[str, str]) -> None:
    """Put on the guise of ``python -m jgesr_lightning train ...``, in a forked process."""
    for descriptor in place.foreign:
        os.close(descriptor)
    log = os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    options = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = open(0, **options)  # type: ignore[call-overload]  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, **options)  # type: ignore[call-overload]  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, **options)  # type: ignore[call-overload]  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up anew, where TMPDIR says
    # Lightning starts the processes of further devices by what __main__ and its arguments are
    sys.argv = ["jgesr_lightning", *arguments]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__spec__ = spec = importlib.util.find_spec("jgesr_lightning.__main__")
    module.__file__ = spec.origin if spec is not None else None


def default_workers(cells: Sequence[Cell]) -> int:
    """Return how many cells run at once where nobody says.

    On a CPU, where a run by itself takes one process a core, the cores are shared out among cells rather than among
    the clients of one: the same number of processes, and none of them waits for another. On a GPU, or where the
    configuration names a number of devices, one.
    """
    runtimes = [cell.config.runtime for cell in cells]
    if any(runtime.devices != "auto" or runtime.num_nodes > 1 for runtime in runtimes):
        return 1
    kinds = {runtime.accelerator for runtime in runtimes}
    if not kinds <= {"auto", "cpu"} or (kinds != {"cpu"} and has_gpu()):
        return 1
    return max(1, min(cores(), len(cells), *(cell.config.clients for cell in cells)))


def has_gpu() -> bool:
    """Whether there is a GPU for computing, by its device files: asking its library would spoil later forks."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that this process may use."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]

"""The Fabric strategy for federated clients: processes share out the clients, and never average their gradients."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from torch import nn

from jgesr_lightning.runtime import rendezvous, signals
from jgesr_lightning.runtime.cores import cores
from jgesr_lightning.runtime.environment import FIRST_PROCESS, HERE, OURSELVES, Seat
from jgesr_lightning.runtime.signals import StopRequest

POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0
"""Time that the first process has to end by itself after another one has failed."""
LAST_WORDS_SECONDS = 10.0
"""Time that it then has to say why, before it is ended."""


class Environment(ClusterEnvironment):
    """Fabric's view of this process's place, told rather than guessed from what variables happen to be set.

    Args:
        seat: the place; `jgesr_lightning.runtime.environment` reads it.
        world_size: number of processes.
    """

    def __init__(self, seat: Seat, world_size: int) -> None:
        super().__init__()
        self.seat = seat
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the other processes are there already."""
        return self.seat.launcher != OURSELVES or self.seat.started_by is not None or dist.is_initialized()

    @property
    def main_address(self) -> str:
        """Host of the first process."""
        return self.seat.address or HERE

    @property
    def main_port(self) -> int:
        """Port of the first process."""
        return self.seat.port or 0

    @staticmethod
    def detect() -> bool:
        """Whether Fabric should choose this by itself."""
        return False

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: it is known."""

    def global_rank(self) -> int:
        """Return the number of this process."""
        return self.seat.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: it is known."""

    def local_rank(self) -> int:
        """Return the number of this process on its node."""
        return self.seat.local_rank

    def node_rank(self) -> int:
        """Return the number of this process's node."""
        return self.seat.node_rank


class ClientParallelStrategy(DDPStrategy):
    """DDP's launching, ranks and collectives without its wrapper.

    ``DistributedDataParallel`` would broadcast rank zero's weights and average gradients over processes, which merges
    different clients. Here a module is left as it is: each process trains its own clients.

    Args:
        stop: a request to stop, which ends waiting for other processes.
        ready_seconds: how long processes that have met wait for each other to be ready (they read data).
        later_timeout: of collectives, once all processes are ready; `timeout` is in force while they connect.
        options: those of `DDPStrategy`.
    """

    def __init__(self, stop: StopRequest, ready_seconds: float, later_timeout: timedelta, **options: Any) -> None:
        super().__init__(**options)
        self._stop = stop
        self._ready_seconds = ready_seconds
        self._later_timeout = later_timeout

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        if not dist.is_initialized():
            self._connect(self._process_group_backend)
        dist.barrier()
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(self._later_timeout)

    def _connect(self, backend: str) -> None:
        """Wait until all processes are there and ready, so that connecting takes no time, and connect them."""
        assert isinstance(self.cluster_environment, Environment)
        seat, launcher = self.cluster_environment.seat, self._launcher
        meeting = rendezvous.meet(seat, self.world_size, self._stop)
        lost = launcher.lost if isinstance(launcher, Launcher) else lambda: ""
        if not self.cluster_environment.creates_processes_externally:  # the others have met before they read data
            meeting.wait(rendezvous.HERE_STAGE, rendezvous.MEET_SECONDS, lost)
        meeting.wait(rendezvous.READY_STAGE, self._ready_seconds, lost)
        dist.init_process_group(
            backend,
            store=meeting.store,
            rank=seat.rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        if isinstance(launcher, Launcher):
            signals.started.extend(launcher.procs)
        if backend == "nccl":
            atexit.register(_destroy_dist_connection)  # NCCL warns of a group that nobody ended

    def _configure_launcher(self) -> None:
        assert isinstance(self.cluster_environment, Environment)
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self._stop)


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine, as Fabric's does, and watches over them in another way.

    Fabric's kills the first process where another one fails, without a word. This one leaves it `GRACE_SECONDS` to
    notice, save and say what it can; and where the first process dies, the others end with it. They are not of its
    process group: Ctrl-C reaches the first process alone, which tells the others when to stop.

    Args:
        cluster_environment: place of this process.
        num_processes: processes on this node.
        num_nodes: nodes.
        stop: a request to stop, which ends waiting for other processes.
    """

    def __init__(self, cluster_environment: Environment, num_processes: int, num_nodes: int, stop: StopRequest) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.seat = cluster_environment.seat
        self.stop = stop

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes, then call `function`, on all of them."""
        if not self.cluster_environment.creates_processes_externally:
            meeting = rendezvous.meet(self.seat, self.num_processes, self.stop)
            self._start(meeting.port)
        if "OMP_NUM_THREADS" not in os.environ:  # Fabric's own does not see a container's share
            threads = max(1, cores() // self.num_processes)
            torch.set_num_threads(threads)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            return function(*args, **kwargs)
        except BaseException:
            for child in self.procs:  # they wait for this one
                child.kill()
            raise

    def lost(self) -> str:
        """Say which of the other processes has ended, or ""."""
        ended = [(rank, child.poll()) for rank, child in enumerate(self.procs, 1)]
        return next((f"process {r} ended with status {s} before all had met" for r, s in ended if s is not None), "")

    def _start(self, port: int) -> None:
        shared = {
            FIRST_PROCESS: str(os.getpid()),
            "MASTER_ADDR": HERE,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.num_processes),
        }
        command = _basic_subprocess_cmd()
        for rank in range(1, self.num_processes):
            environment = {**os.environ, **shared, "LOCAL_RANK": str(rank)}
            self.procs.append(subprocess.Popen(command, env=environment, start_new_session=True))
        threading.Thread(target=watch_children, args=(self.procs,), daemon=True).start()


_last_words: list[Callable[[str], object]] = []


@contextmanager
def last_words(say: Callable[[str], object]) -> Iterator[None]:
    """Context in which `say` is told why, before another process's failure ends this one from outside its loop."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def watch_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for the other processes; where one fails and this one has not ended soon after, end everything."""
    while True:
        statuses = [child.poll() for child in children]
        failed = next(((rank, status) for rank, status in enumerate(statuses, 1) if status), None)
        if failed is not None:
            break
        if all(status == 0 for status in statuses):
            return
        time.sleep(POLL_SECONDS)
    time.sleep(GRACE_SECONDS)
    reason = f"process {failed[0]} ended with status {failed[1]}"
    print(f"error: {reason}; so does everything", file=sys.stderr, flush=True)
    for child in children:
        child.kill()
    speaking = threading.Thread(target=_say_last_words, args=(reason,), daemon=True)
    speaking.start()
    speaking.join(LAST_WORDS_SECONDS)  # this process ends, whatever becomes of them
    os._exit(1)


def _say_last_words(reason: str) -> None:
    for say in list(_last_words):
        with suppress(Exception):
            say(reason)


def watch_parent(parent: int) -> None:
    """End this process when the one that started it is gone: it may be waiting for it inside a collective."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def leave_at_exit() -> None:
    """Have this process leave the others in order when its program ends; for runs that ended well.

    A thread of gloo's that outlives the interpreter aborts the process, which then counts as failed (PyTorch issue
    190489). After a failure something may be under way still, and to leave would be to wait for it.
    """
    if dist.is_initialized():
        atexit.register(_destroy_dist_connection)

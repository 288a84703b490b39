"""How many processes a run has, who starts them, and the Fabric object they share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities import rank_zero_only

from jgesr_lightning.files import say
from jgesr_lightning.runtime import environment, rendezvous, strategy
from jgesr_lightning.runtime.cores import cores
from jgesr_lightning.runtime.environment import HERE, OURSELVES, SRUN, LaunchError, Seat
from jgesr_lightning.runtime.signals import StopRequest

# Processes meet first of all, and wait longer for those that are still reading data; afterwards a process waits for the
# one with the most training to do. A dead one is noticed by its closed connection (gloo) or by whoever started it.
READY_SECONDS = 1800.0
CONNECT_TIMEOUT = timedelta(minutes=2)
COLLECTIVE_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Launch:
    """What Fabric is asked for.

    Attributes:
        accelerator: "cpu" or "cuda".
        devices: processes on each node.
        num_nodes: number of nodes.
        launcher: who starts the processes: "ourselves", "torchrun" or "srun".
    """

    accelerator: str
    devices: int
    num_nodes: int
    launcher: str = OURSELVES

    @property
    def world_size(self) -> int:
        """Number of processes in all."""
        return self.devices * self.num_nodes


def started_by_fabric_run() -> bool:
    """Whether ``fabric run`` started this process: a Fabric is then launched as it is made."""
    return os.environ.get("LT_CLI_USED", "0") == "1"


def plan(accelerator: str, devices: int | str, num_nodes: int, clients: int) -> Launch:
    """Decide on processes, and put variables aside that no launcher stands behind.

    devices "auto" is what the launcher started (torchrun, srun), else what an earlier run of this program started, else
    every visible GPU, else one process a core; never more processes than clients where the choice is ours.

    Raises:
        LaunchError: no such accelerator here, the launcher started another number of processes, its variables are half
            set, the port where processes should meet is taken, there are more processes than clients, or another number
            than an earlier run of this program had.
    """
    line = environment.settle()
    if line:
        say(line)
    seat = environment.seat()
    rank_zero_only.rank = seat.rank  # type: ignore[attr-defined]
    launch = _plan(seat, _accelerator(accelerator), devices, num_nodes, clients)
    if launch.world_size > clients:
        raise LaunchError(
            f"{launch.world_size} processes for {clients} clients: each process trains at least one; "
            f"use runtime.devices={max(1, clients // launch.num_nodes)}"
            + ("" if launch.launcher == OURSELVES else f" and start as many with {launch.launcher}")
        )
    if dist.is_initialized() and launch.world_size != (count := dist.get_world_size()):
        raise LaunchError(
            f"runtime.devices is {launch.devices}, but an earlier run of this program started {count} processes, which "
            + (f"stay: set runtime.devices={count}, or " if count <= clients else "stay: ")
            + "start this run from a program of its own"
        )
    if launch.world_size > 1 and launch.launcher == OURSELVES and seat.started_by is None:
        if _unrepeatable():
            raise LaunchError(
                f"runtime.devices is {launch.devices}, but an interactive session, or a process of a pool, can "
                "start no others; use 1"
            )
        _check_port(seat)
    return launch


def _plan(seat: Seat, kind: str, devices: int | str, num_nodes: int, clients: int) -> Launch:
    if seat.launcher != OURSELVES:
        launcher, per_node, nodes = seat.launcher, seat.per_node, seat.nodes
        if devices not in ("auto", per_node):
            raise LaunchError(
                f"runtime.devices is {devices}, but {launcher} started {per_node} processes a node; "
                f"set runtime.devices={per_node} (or auto), or start {devices} "
                f"({'--ntasks-per-node' if launcher == SRUN else '--nproc-per-node'}={devices})"
            )
        if num_nodes not in (1, nodes):
            raise LaunchError(
                f"runtime.num_nodes is {num_nodes}, but {launcher} started processes on {nodes}; "
                f"set runtime.num_nodes={nodes}"
            )
        if kind == "cuda" and per_node > torch.cuda.device_count():
            raise LaunchError(
                f"{launcher} started {per_node} processes a node, but {torch.cuda.device_count()} GPUs are visible to "
                f"each; start one process a GPU"
                + (", and ask for them with --gpus-per-node, not --gpus-per-task" if launcher == SRUN else "")
            )
        return Launch(kind, per_node, nodes, launcher)
    if num_nodes > 1:
        raise LaunchError(
            f"runtime.num_nodes is {num_nodes}, but nothing started processes on other machines; start the program "
            f"with srun, or on each machine with: torchrun --nnodes={num_nodes} --nproc-per-node=DEVICES "
            f"--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 -m jgesr_lightning train ..."
        )
    available = _available(kind)
    if devices == "auto":
        count = dist.get_world_size() if dist.is_initialized() else available
        return Launch(kind, 1 if _unrepeatable() else max(1, min(count, clients)), 1)
    count = int(devices)
    if kind != "cpu" and count > available:
        raise LaunchError(f"runtime.devices is {count}, but {available} {kind} devices are visible")
    return Launch(kind, count, 1)


def _accelerator(name: str) -> str:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise LaunchError(f"runtime.accelerator is {name!r}, but there is none here; use runtime.accelerator=cpu")
    return "cuda"


def _available(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.device_count()
    return cores()


def _unrepeatable() -> bool:
    """Whether nothing starts this once more: a notebook, a prompt, what came through a pipe, a process of a pool.

    A process of a pool would begin the program that made the pool; a study's cell has a program of its own, `train`.
    """
    main = sys.modules["__main__"]
    program = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    pooled = multiprocessing.parent_process() is not None and (spec is None or spec.name != "jgesr_lightning.__main__")
    return hasattr(sys, "ps1") or program is None or not Path(program).exists() or pooled


def _check_port(seat: Seat) -> None:
    """Refuse a port of the user's that is taken, before anything is begun."""
    if seat.port is None or dist.is_initialized():
        return
    try:
        rendezvous.listen(seat).close()
    except OSError as error:
        raise LaunchError(f"{rendezvous.taken(seat)} ({error.strerror})") from error


def meet_early(launch: Launch) -> None:
    """Let processes that something else started find each other, before any of them reads data.

    Raises:
        MeetingError: they did not come together within two minutes, or a signal came.
        KeyboardInterrupt: Ctrl-C.
    """
    seat = environment.seat()
    if launch.world_size == 1 or (seat.launcher == OURSELVES and seat.started_by is None) or dist.is_initialized():
        return
    if seat.started_by is not None:
        threading.Thread(target=strategy.watch_parent, args=(seat.started_by,), daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            # the first process tells of a stop by it, which may come after this one's run has ended
            signal.signal(signal.SIGTERM, lambda *_: None)
    with StopRequest() as stop:
        meeting = rendezvous.meet(_located(seat), launch.world_size, stop)
        meeting.wait(rendezvous.HERE_STAGE, rendezvous.MEET_SECONDS)


def _located(seat: Seat) -> Seat:
    """Return `seat` with the address that SLURM's tasks find by themselves."""
    if seat.address is not None:
        return seat
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or HERE
    return replace(seat, address=SLURMEnvironment.resolve_root_node_address(nodes))


def build_fabric(
    launch: Launch, precision: str, callbacks: Sequence[object], stop: StopRequest | None = None
) -> Fabric:
    """Return a Fabric for `launch`, not launched yet; `stop` ends its waiting for other processes."""
    chosen: Any = "auto"
    if launch.world_size > 1:
        chosen = strategy.ClientParallelStrategy(
            StopRequest() if stop is None else stop,
            ready_seconds=READY_SECONDS,
            later_timeout=COLLECTIVE_TIMEOUT,
            timeout=CONNECT_TIMEOUT,
        )
    return Fabric(
        accelerator=launch.accelerator,
        strategy=chosen,
        devices=launch.devices,
        num_nodes=launch.num_nodes,
        precision=precision,  # type: ignore[arg-type]
        plugins=[strategy.Environment(_located(environment.seat()), launch.world_size)],
        callbacks=list(callbacks),
    )

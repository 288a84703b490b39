"""How many processes a run has, who starts them, and the Fabric object they share."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities import rank_zero_only

from jgesr_lightning.runtime import strategy

# A process waits for the one with the most training to do; a dead one is noticed by its closed connection, not by this.
COLLECTIVE_TIMEOUT = timedelta(hours=12)


class LaunchError(ValueError):
    """Devices, processes and the environment do not fit together; the message says what to change."""


@dataclass(frozen=True)
class Launch:
    """What Fabric is asked for.

    Attributes:
        accelerator: "cpu", "cuda" or "mps".
        devices: processes on each node.
        num_nodes: number of nodes.
    """

    accelerator: str
    devices: int
    num_nodes: int

    @property
    def world_size(self) -> int:
        """Number of processes in all."""
        return self.devices * self.num_nodes


def first_process() -> bool:
    """Whether this is the process that speaks and writes: rank zero, or the one that will launch the others."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


def plan(accelerator: str, devices: int | str, num_nodes: int, clients: int) -> Launch:
    """Decide on processes.

    devices "auto" is what the launcher started (torchrun, srun), else every visible GPU, else one process a core; never
    more processes than clients where the choice is ours.

    Raises:
        LaunchError: no such accelerator here, or the launcher started another number of processes.
    """
    kind = _accelerator(accelerator)
    started = _started_by_launcher()
    if started is not None:
        launcher, per_node, nodes = started
        if devices not in ("auto", per_node):
            raise LaunchError(
                f"runtime.devices is {devices}, but {launcher} started {per_node} processes a node; "
                f"set runtime.devices={per_node} (or auto), or start {devices}"
            )
        if num_nodes not in (1, nodes):
            raise LaunchError(
                f"runtime.num_nodes is {num_nodes}, but {launcher} started processes on {nodes}; "
                f"set runtime.num_nodes={nodes}"
            )
        if kind == "cuda" and per_node > torch.cuda.device_count():
            raise LaunchError(
                f"{launcher} started {per_node} processes a node, but {torch.cuda.device_count()} GPUs are visible"
            )
        return Launch(kind, per_node, nodes)
    available = _available(kind)
    if devices == "auto":
        return Launch(kind, max(1, min(available, -(-clients // num_nodes))), num_nodes)
    count = int(devices)
    if kind != "cpu" and count > available:
        raise LaunchError(f"runtime.devices is {count}, but {available} {kind} devices are visible")
    return Launch(kind, count, num_nodes)


def _accelerator(name: str) -> str:
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return "cuda" if has["cuda"] else "cpu"
    kind = "cuda" if name == "gpu" and not has["mps"] else "mps" if name == "gpu" else name
    if not has[kind]:
        raise LaunchError(f"runtime.accelerator is {name!r}, but there is none here; use runtime.accelerator=cpu")
    return kind


def _available(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "mps":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _started_by_launcher() -> tuple[str, int, int] | None:
    """Return (launcher, processes a node, nodes) where something else started the processes."""
    environment = os.environ
    if "LOCAL_WORLD_SIZE" in environment and "TORCHELASTIC_RUN_ID" in environment:
        per_node = int(environment["LOCAL_WORLD_SIZE"])
        return "torchrun", per_node, int(environment["WORLD_SIZE"]) // per_node
    if not SLURMEnvironment.detect():
        return None
    tasks = int(environment["SLURM_NTASKS"])
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if "SLURM_STEP_ID" not in environment or environment.get("SLURM_STEP_ID") in ("4294967291", "batch"):
        if tasks == 1:
            return None
        raise LaunchError(f"this SLURM job has {tasks} tasks; start the program with srun, which runs all of them")
    if tasks % nodes:
        raise LaunchError(f"{tasks} tasks on {nodes} nodes: give each node as many, with --ntasks-per-node")
    return "srun", tasks // nodes, nodes


def build_fabric(launch: Launch, precision: str, callbacks: Sequence[object]) -> Fabric:
    """Return a Fabric for `launch`, not launched yet."""
    for package in ("fabric", "pytorch"):  # their banners say what our own first lines say
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*srun.*command is available.*")
    strategy.register()
    chosen: Any = "auto"
    if launch.world_size > 1:
        chosen = strategy.ClientParallelStrategy(timeout=COLLECTIVE_TIMEOUT)
    return Fabric(
        accelerator=launch.accelerator,
        strategy=chosen,
        devices=launch.devices,
        num_nodes=launch.num_nodes,
        precision=precision,  # type: ignore[arg-type]
        callbacks=list(callbacks),
    )

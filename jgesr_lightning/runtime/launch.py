"""How many processes a run has, who starts them, and the Fabric object they share."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import rank_zero_only

from jgesr_lightning.runtime import strategy

# The first collective waits for processes that are still reading data; afterwards a process waits for the one with the
# most training to do. A dead one is noticed by its closed connection (gloo) or by whoever started it, not by this.
START_TIMEOUT = timedelta(minutes=30)
COLLECTIVE_TIMEOUT = timedelta(hours=12)
OURSELVES, TORCHRUN, SRUN = "ourselves", "torchrun", "srun"
SHELLS = ("bash", "interactive")
BATCH_STEPS = ("batch", "4294967291")


class LaunchError(ValueError):
    """Devices, processes and the environment do not fit together; the message says what to change."""


@dataclass(frozen=True)
class Launch:
    """What Fabric is asked for.

    Attributes:
        accelerator: "cpu", "cuda" or "mps".
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

    @property
    def environment(self) -> ClusterEnvironment:
        """Fabric's view of the launcher, named rather than guessed from what variables happen to be set."""
        kinds = {OURSELVES: LightningEnvironment, TORCHRUN: TorchElasticEnvironment, SRUN: SLURMEnvironment}
        found: ClusterEnvironment = kinds[self.launcher]()
        return found


def first_process() -> bool:
    """Whether this is the process that speaks and writes: rank zero, or the one that will launch the others."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


def started_by_fabric_run() -> bool:
    """Whether ``fabric run`` started this process: a Fabric is then launched as it is made."""
    return os.environ.get("LT_CLI_USED", "0") == "1"


def plan(accelerator: str, devices: int | str, num_nodes: int, clients: int) -> Launch:
    """Decide on processes.

    devices "auto" is what the launcher started (torchrun, srun), else every visible GPU, else one process a core; never
    more processes than clients where the choice is ours.

    Raises:
        LaunchError: no such accelerator here, the launcher started another number of processes, or there are more
            processes than clients.
    """
    launch = _plan(_accelerator(accelerator), devices, num_nodes, clients)
    if launch.world_size > clients:
        raise LaunchError(
            f"{launch.world_size} processes for {clients} clients: each process trains at least one; "
            f"use runtime.devices={max(1, clients // launch.num_nodes)}"
            + ("" if launch.launcher == OURSELVES else f" and start as many with {launch.launcher}")
        )
    return launch


def _plan(kind: str, devices: int | str, num_nodes: int, clients: int) -> Launch:
    started = _started_by_launcher()
    if started is not None:
        launcher, per_node, nodes = started
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
        return Launch(kind, max(1, min(available, clients)), 1)
    count = int(devices)
    if kind != "cpu" and count > available:
        raise LaunchError(f"runtime.devices is {count}, but {available} {kind} devices are visible")
    return Launch(kind, count, 1)


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
        return TORCHRUN, per_node, int(environment["WORLD_SIZE"]) // per_node
    if "SLURM_NTASKS" not in environment:
        return None
    tasks = int(environment["SLURM_NTASKS"])
    if environment.get("SLURM_STEP_ID", "batch") in BATCH_STEPS:  # the batch script itself, or a shell of salloc
        if tasks == 1 or environment.get("SLURM_JOB_NAME") in SHELLS:
            return None
        raise LaunchError(f"this SLURM job has {tasks} tasks; start the program with srun, which runs all of them")
    if environment.get("SLURM_JOB_NAME") in SHELLS:
        if tasks == 1:
            return None
        raise LaunchError(
            f"srun started {tasks} tasks under the job name {environment['SLURM_JOB_NAME']!r}, which Lightning takes "
            f"for a shell; give the step another name: srun --job-name=train ..."
        )
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if tasks % nodes:
        raise LaunchError(f"{tasks} tasks on {nodes} nodes: give each node as many, with --ntasks-per-node")
    per_node = tasks // nodes
    asked = environment.get("SLURM_NTASKS_PER_NODE")
    if tasks > 1 and asked is None:
        raise LaunchError(f"srun was given --ntasks={tasks}; use --ntasks-per-node={per_node}, one for each device")
    if asked is not None and re.fullmatch(r"\d+", asked) and int(asked) != per_node:
        raise LaunchError(
            f"the SLURM job has --ntasks-per-node={asked}, but srun started {per_node} on each node; "
            f"give srun --ntasks-per-node={per_node} as well"
        )
    return SRUN, per_node, nodes


def build_fabric(launch: Launch, precision: str, callbacks: Sequence[object]) -> Fabric:
    """Return a Fabric for `launch`, not launched yet."""
    for package in ("fabric", "pytorch"):  # their banners say what our own first lines say
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    # where srun exists it need not be used; where it must be, `plan` says so
    warnings.filterwarnings("ignore", message=".*srun.*command is available.*")
    chosen: Any = "auto"
    if launch.world_size > 1:
        chosen = strategy.ClientParallelStrategy(timeout=START_TIMEOUT, later_timeout=COLLECTIVE_TIMEOUT)
    return Fabric(
        accelerator=launch.accelerator,
        strategy=chosen,
        devices=launch.devices,
        num_nodes=launch.num_nodes,
        precision=precision,  # type: ignore[arg-type]
        plugins=[launch.environment],
        callbacks=list(callbacks),
    )

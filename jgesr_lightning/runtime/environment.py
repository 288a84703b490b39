"""Who started this process, and which of a run's processes it is, as the environment tells.

The variables of a launcher count only where all of them are there. Some are set by containers or left over from other
programs: where they name the only or the first process they are put aside, with a line; where they name others, what is
meant cannot be known, and the run is refused, for two processes that each take themselves for the first would do the
same work twice or wait for each other for ever. Nothing here imports PyTorch or Lightning, which read these too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

OURSELVES, TORCHRUN, SRUN = "ourselves", "torchrun", "srun"
FIRST_PROCESS = "JGESR_FIRST_PROCESS"
"""Set for the processes that a run starts itself, to the number of the process that started them."""
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "JSM_NAMESPACE_RANK")
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
PLACE = ("MASTER_ADDR", "MASTER_PORT")
FABRIC = ("LT_CLI_USED", "LT_ACCELERATOR", "LT_STRATEGY", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")
FULL_SET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *PLACE)
SHELLS = ("bash", "zsh", "fish", "tcsh", "interactive")  # not sh, by which scripts are started, too
BATCH_STEPS = ("batch", "4294967291", "4294967290")  # the last is that of a shell of salloc's on a node
HERE = "127.0.0.1"
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class LaunchError(ValueError):
    """Devices, processes and the environment do not fit together; the message says what to change."""


@dataclass(frozen=True)
class Seat:
    """The place of this process among those of its run.

    Attributes:
        launcher: who starts the processes: "ourselves", "torchrun" or "srun".
        rank: number among all processes.
        local_rank: number among those of this node.
        node_rank: number of the node.
        per_node: processes that the launcher started a node.
        nodes: nodes that the launcher uses.
        address: where the processes meet: host of the first one; None: the first node of the SLURM job.
        port: port there; None: any free one.
        started_by: number of the process of this run that started this one, or None.
    """

    launcher: str = OURSELVES
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    per_node: int = 1
    nodes: int = 1
    address: str | None = HERE
    port: int | None = None
    started_by: int | None = None


def seat(environment: Mapping[str, str] = os.environ) -> Seat:
    """Read this process's place from the environment.

    Raises:
        LaunchError: variables contradict each other, or say that there are other processes but not which.
    """
    given = {name: value for name, value in environment.items() if value}  # an empty variable is as good as none
    if FIRST_PROCESS in given:
        rank = _number(given, "LOCAL_RANK")
        port, parent = _number(given, "MASTER_PORT"), _number(given, FIRST_PROCESS)
        return Seat(rank=rank, local_rank=rank, port=port, started_by=parent)
    if "TORCHELASTIC_RUN_ID" in given or all(name in given for name in FULL_SET):
        return _by_torchrun(given)
    if "SLURM_NTASKS" in given and (found := _by_srun(given)) is not None:
        return found
    return _alone(given)


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process that speaks and writes: rank zero, or one that cannot tell."""
    try:
        return seat(environment).rank == 0
    except LaunchError:
        return True


def settle(environment: MutableMapping[str, str] = os.environ) -> str:
    """Remove the variables that do not count, which libraries would read; return a line that names them, or "".

    Also asks PyTorch, if it is not imported yet, to leave the C++ traces out with which it reports a lost connection,
    besides the exception that becomes our own line.

    Raises:
        LaunchError: as `seat`.
    """
    environment.setdefault(CPP_LOG_LEVEL, "FATAL")
    here = seat(environment)
    if here.started_by is not None:
        return ""
    unused = [name for name in (*RANKS, *SIZES) if name in environment and here.launcher != TORCHRUN]
    if here.launcher == OURSELVES:
        unused += [name for name in PLACE if name in environment and not (name == "MASTER_PORT" and here.port)]
    if here.launcher != TORCHRUN or environment.get("LT_CLI_USED") != "1":  # which `fabric run` sets, with torchrun's
        unused += [name for name in FABRIC if name in environment]
    named = [f"{name}={environment.pop(name)}" for name in unused]
    by = "no launcher" if here.launcher == OURSELVES else here.launcher
    return f"{', '.join(named)}: ignored, as {by} started this process" if named and here.rank == 0 else ""


def _by_torchrun(given: Mapping[str, str]) -> Seat:
    missing = [name for name in FULL_SET if name not in given]
    if missing:
        raise LaunchError(
            f"torchrun's variables are half set: TORCHELASTIC_RUN_ID is there, {_listed(missing)} missing; "
            f"start the program with torchrun, or unset TORCHELASTIC_RUN_ID"
        )
    rank, world = _number(given, "RANK"), _number(given, "WORLD_SIZE", at_least=1)
    local, per_node = _number(given, "LOCAL_RANK"), _number(given, "LOCAL_WORLD_SIZE", at_least=1)
    if rank >= world or local >= per_node or world % per_node:
        values = ", ".join(f"{name}={given[name]}" for name in FULL_SET[:4])
        raise LaunchError(f"{values} contradict each other; give each machine as many processes (--nproc-per-node)")
    node = _number(given, "GROUP_RANK") if "GROUP_RANK" in given else rank // per_node
    return Seat(TORCHRUN, rank, local, node, per_node, world // per_node, given["MASTER_ADDR"], _port(given))


def _by_srun(given: Mapping[str, str]) -> Seat | None:
    """Return the place among the tasks of srun; None in a batch script or a shell, which starts its own processes."""
    tasks, name = _number(given, "SLURM_NTASKS", at_least=1), given.get("SLURM_JOB_NAME")
    if given.get("SLURM_STEP_ID", "batch") in BATCH_STEPS:  # the batch script itself, or a shell of salloc
        if tasks == 1 or name in SHELLS:
            return None
        raise LaunchError(f"this SLURM job has {tasks} tasks; start the program with srun, which runs all of them")
    if name in SHELLS:
        if tasks == 1:
            return None
        raise LaunchError(
            f"srun started {tasks} tasks under the job name {name!r}, which is taken for "
            f"that of a shell; give the step another name: srun --job-name=train ..."
        )
    missing = [key for key in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") if key not in given]
    if missing:
        raise LaunchError(
            f"srun's variables are half set: SLURM_STEP_ID is there, {_listed(missing)} missing; start the program "
            f"with srun, or unset SLURM_STEP_ID"
        )
    counts = [key for key in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if key in given]
    nodes = _number(given, counts[0], at_least=1) if counts else 1
    if tasks % nodes:
        raise LaunchError(f"{tasks} tasks on {nodes} nodes: give each node as many, with --ntasks-per-node")
    per_node = tasks // nodes
    asked = given.get("SLURM_NTASKS_PER_NODE")
    if tasks > 1 and asked is None:
        raise LaunchError(f"srun was given --ntasks={tasks}; use --ntasks-per-node={per_node}, one for each device")
    if asked is not None and re.fullmatch(r"\d+", asked) and int(asked) != per_node:
        raise LaunchError(
            f"the SLURM job has --ntasks-per-node={asked}, but srun started {per_node} on each node; "
            f"give srun --ntasks-per-node={per_node} as well"
        )
    rank, local, node = (_number(given, key) for key in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    if rank >= tasks or local >= per_node or node >= nodes:
        raise LaunchError(f"SLURM_PROCID={rank}, SLURM_LOCALID={local}, SLURM_NODEID={node} contradict {tasks} tasks")
    port = _port(given) if "MASTER_PORT" in given else _port_of_step(given)
    return Seat(SRUN, rank, local, node, per_node, nodes, given.get("MASTER_ADDR"), port)


def _port_of_step(given: Mapping[str, str]) -> int:
    """Return a port that all tasks of a job step find by themselves, another one for each step."""
    job = given.get("SLURM_JOB_ID", "0")
    step = given.get("SLURM_STEP_ID", "0")
    return 15000 + (int(job[-4:]) + 101 * int(step)) % 10000 if job.isdigit() and step.isdigit() else 15000


def _alone(given: Mapping[str, str]) -> Seat:
    """Return the place of a process that no launcher started, if nothing speaks of others."""
    others = [name for name in (*RANKS, "SLURM_PROCID") if name in given and _number(given, name) > 0]
    others += [name for name in SIZES if name in given and _number(given, name) > 1]
    if others:
        named = ", ".join(f"{name}={given[name]}" for name in others)
        missing = [name for name in FULL_SET if name not in given]
        raise LaunchError(
            f"{named}: set as if this were one of several processes, but {_listed(missing)} not set; start them with "
            f"torchrun or srun, or unset {', '.join(others)}"
        )
    port = given.get("MASTER_PORT", "")
    return Seat(port=int(port) if port.isdecimal() and 0 < int(port) < 2**16 else None)


def _number(given: Mapping[str, str], name: str, at_least: int = 0) -> int:
    value = given.get(name, "")
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) < at_least:
        raise LaunchError(
            f"{name} is {value[:40]!r}, where a launcher sets a whole number of at least {at_least}; unset it, or "
            f"start the program with torchrun or srun"
        )
    return int(value)


def _port(given: Mapping[str, str]) -> int:
    port = _number(given, "MASTER_PORT", at_least=1)
    if port >= 2**16:
        raise LaunchError(f"MASTER_PORT is {port}; a port is a number from 1 to 65535")
    return port


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"

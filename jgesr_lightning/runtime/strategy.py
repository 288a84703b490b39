"""The Fabric strategy for federated clients: processes share out the clients, and never average their gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch import nn

NAME = "client_parallel"
POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0
"""Time that the first process has to end by itself after another one has failed."""


class ClientParallelStrategy(DDPStrategy):
    """DDP's launching, ranks and collectives without its wrapper.

    ``DistributedDataParallel`` would broadcast rank zero's weights and average gradients over processes, which merges
    different clients. Here a module is left as it is: each process trains its own clients.

    Args:
        later_timeout: of collectives, once all processes have met; None: `timeout`, as while they meet.
        options: those of `DDPStrategy`.
    """

    def __init__(self, later_timeout: timedelta | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._later_timeout = later_timeout

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        dist.barrier()
        if self._later_timeout is not None:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(self._later_timeout)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen" and self.cluster_environment is not None:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine, as Fabric's does, and watches over them in another way.

    Fabric's kills the first process where another one fails, without a word. This one leaves it `GRACE_SECONDS` to
    notice, save and say what it can; and where the first process dies, the others end with it.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes, then call `function`, on all of them."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=watch_children, args=(self.procs,), daemon=True).start()
        elif os.environ.get(PARENT):
            threading.Thread(target=watch_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[PARENT]


PARENT = "JGESR_FIRST_PROCESS"


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
    print(f"error: process {failed[0]} ended with status {failed[1]}; so does everything", file=sys.stderr, flush=True)
    for child in children:
        child.kill()
    os._exit(1)


def watch_parent(parent: int) -> None:
    """End this process when the one that started it is gone: it may be waiting for it inside a collective."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def register() -> None:
    """Make the strategy known to Fabric by name (once)."""
    if NAME not in STRATEGY_REGISTRY:
        description = "independent clients on each process"
        options: dict[str, Any] = {"start_method": "popen"}
        STRATEGY_REGISTRY.register(NAME, ClientParallelStrategy, description=description, **options)

"""The Fabric strategy for federated clients: processes share out the clients, and never average their gradients."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn

NAME = "client_parallel"


class ClientParallelStrategy(DDPStrategy):
    """DDP's launching, ranks and collectives without its wrapper.

    ``DistributedDataParallel`` would broadcast rank zero's weights and average gradients over processes, which merges
    different clients. Here a module is left as it is: each process trains its own clients.
    """

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module


def register() -> None:
    """Make the strategy known to Fabric by name (once)."""
    if NAME not in STRATEGY_REGISTRY:
        description = "independent clients on each process"
        options: dict[str, Any] = {"start_method": "popen"}
        STRATEGY_REGISTRY.register(NAME, ClientParallelStrategy, description=description, **options)

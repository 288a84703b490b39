"""Which engine trains the clients: the choice, its reason, and the one factory."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric import Fabric
from torch import nn

from jgesr_lightning.checks import one_of
from jgesr_lightning.client import ClientModule
from jgesr_lightning.training.base import ClientData, Engine
from jgesr_lightning.training.sequential import SequentialEngine

ENGINES: dict[str, type[SequentialEngine]] = {"sequential": SequentialEngine}


def choose_engine(name: str, device_type: str, net: nn.Module, batch_size: int) -> tuple[str, str]:
    """Return the engine's name and why it was taken; `name` is an engine or "auto".

    Raises:
        ValueError: unknown name (the known ones are listed).
    """
    one_of("engine", name, ("auto", *ENGINES))
    if name != "auto":
        return name, "as configured"
    return "sequential", f"the faster on {device_type}"


def build_engine(
    name: str,
    fabric: Fabric,
    client: ClientModule,
    data: Sequence[ClientData],
    clients: Sequence[int],
    num_classes: int,
    epochs: int,
    batch_size: int,
    seed: int,
) -> tuple[Engine, str]:
    """Return the engine and the reason it was taken; arguments as those of `SequentialEngine`."""
    taken, reason = choose_engine(name, fabric.device.type, client.net, batch_size)
    return ENGINES[taken](fabric, client, data, clients, num_classes, epochs, batch_size, seed), reason

"""Which engine trains the clients: the choice, its reason, and the one factory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.fabric import Fabric
from torch import nn

from jgesr_lightning.checks import one_of
from jgesr_lightning.client import ClientModule
from jgesr_lightning.training.base import ClientData, Engine
from jgesr_lightning.training.batches import BatchSize
from jgesr_lightning.training.network import check_stacked
from jgesr_lightning.training.sequential import SequentialEngine
from jgesr_lightning.training.stacked import StackedEngine, check_precision

ENGINES: dict[str, Callable[..., Engine]] = {"sequential": SequentialEngine, "stacked": StackedEngine}


def choose_engine(
    name: str,
    device_type: str,
    net: nn.Module,
    batch_size: BatchSize,
    precision: str = "32-true",
    input_shape: Sequence[int] | None = None,
) -> tuple[str, str]:
    """Return which engine to take, and why.

    The rule: stacked wherever it can train the network. On a CPU it was the faster for both networks at batches of 10
    and of 64 (`make bench`), on an accelerator it is the one that fills the device.

    Args:
        name: "sequential", "stacked" or "auto".
        device_type: "cpu", "cuda", ...
        net: the clients' network.
        batch_size: samples a step, or "full".
        precision: Fabric's name of the precision.
        input_shape: of a sample; the stacked network is then tried on two of them.

    Raises:
        ValueError: unknown name (the known ones are listed); or "stacked" with a network or precision it cannot train.
    """
    one_of("engine", name, ("auto", *ENGINES))
    if name == "sequential":
        return name, "as configured"
    try:
        check_precision(precision)
        check_stacked(net, input_shape)
    except ValueError as error:
        if name == "stacked":
            raise
        return "sequential", str(error).partition("; use engine=")[0]  # which is done already
    if name == "stacked":
        return name, "as configured"
    advance = "one client at a time on fixed buffers" if device_type == "cpu" else "all clients at once"
    steps = "with full steps" if batch_size == "full" else f"at batches of {batch_size}"
    return "stacked", f"the faster on {device_type} {steps}: {advance}"


def precision_remark(device_type: str, precision: str) -> str | None:
    """Return what the user should know of a precision on a kind of device, or None.

    Measured on an AMD EPYC without bf16 arithmetic of its own: 3 to 8 times the time of float32, in either engine.
    """
    if device_type == "cpu" and precision == "bf16-mixed":
        return (
            "bf16-mixed on a CPU takes several times as long as runtime.precision=32-true, unless the processor "
            "multiplies in bf16 itself"
        )
    return None


def build_engine(
    name: str,
    fabric: Fabric,
    client: ClientModule,
    data: Sequence[ClientData],
    clients: Sequence[int],
    num_classes: int,
    epochs: int,
    batch_size: BatchSize,
    seed: int,
    input_shape: Sequence[int] | None = None,
) -> tuple[Engine, str]:
    """Return the engine and the reason it was taken.

    `name` and `input_shape` are those of `choose_engine`, the rest those of the engines.

    Raises:
        ValueError: see `choose_engine`.
    """
    precision = str(fabric.strategy.precision.precision)
    taken, reason = choose_engine(name, fabric.device.type, client.net, batch_size, precision, input_shape)
    return ENGINES[taken](fabric, client, data, clients, num_classes, epochs, batch_size, seed), reason

"""What a local-training engine is: it takes the models that were sent and returns what the clients made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.functional import one_hot

from jgesr_lightning.client import ClientModule
from jgesr_lightning.seeding import DROPOUT, derive
from jgesr_lightning.training.batches import BatchSize, part_size, visit_orders

Deliver = Callable[[int, Tensor], None]
"""Called as ``deliver(row, model)`` when the client in local row `row` has finished: `model` (d,) is its model in the
order of the layout. Whoever takes it copies it: the engine may write over that memory afterwards."""


@dataclass(frozen=True)
class ClientData:
    """One client's samples, normalised, on the device where they are used.

    Attributes:
        train_inputs: (n, *shape): (n, channels, height, width) of images, (n, features) of tables.
        train_labels: (n,) int64.
        test_inputs: (m, *shape).
        test_labels: (m,) int64.
    """

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def size(self) -> int:
        """Number of training samples."""
        return len(self.train_labels)


def answers(scores: Tensor, labels: Tensor) -> Tensor:
    """Return class scores (..., classes) in which a sample without numbers for scores counts as wrong.

    The largest of NaN would be class 0, right for those who hold that class. `labels` (...) are those of the samples.
    """
    classes = scores.shape[-1]
    other = one_hot((labels + 1) % classes, classes).to(scores.dtype)
    return torch.where(scores.isnan().any(-1, keepdim=True), other, scores)


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """Trains and evaluates the clients of this process.

    Engines differ in speed alone: batches are drawn by one generator per (seed, round, client), so that every engine
    sees the same samples in the same order and returns the same models up to rounding.

    Args:
        fabric: launched Fabric; its precision and device apply.
        client: the one client slot of this process: network, penalties and settings.
        data: samples of each local client.
        clients: global index of each local client.
        num_classes: number of classes.
        epochs: local epochs a round.
        batch_size: samples a step, or "full".
        seed: seed of the batches.
    """

    name: ClassVar[str]

    fabric: Fabric
    client: ClientModule
    data: Sequence[ClientData]
    clients: Sequence[int]
    num_classes: int
    epochs: int
    batch_size: BatchSize
    seed: int

    @property
    def part(self) -> int:
        """Samples that are computed at once, see `part_size`."""
        return part_size(self.batch_size, self.fabric.device.type)

    def orders(self, round_number: int, row: int) -> Tensor:
        """Return (epochs, samples) int64: the order of the samples of the client in local `row`, see `visit_orders`."""
        size, client = self.data[row].size, self.clients[row]
        return visit_orders(size, self.epochs, self.batch_size, self.seed, round_number, client)

    def dropout_seed(self, round_number: int, row: int) -> int:
        """Return the seed of a client's masks: they follow the round and the client, not the order of the clients."""
        return derive(self.seed, DROPOUT, round_number, self.clients[row])

    @abstractmethod
    def train(
        self,
        round_number: int,
        rows: Sequence[int],
        sent: Tensor,
        deliver: Deliver,
        stopping: Callable[[], bool] = lambda: False,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """Train the clients in local `rows` from the models they were sent.

        Args:
            round_number: keys the random generators.
            rows: local row numbers of the clients that take part.
            sent: (local clients, d) models sent; never modified.
            deliver: receives each client's model when it is done.
            stopping: asked between clients; True abandons the rest.
            anchors: (local clients, d) models that the penalties pull to, where they are not those that training starts
                from; never modified.

        Returns:
            (local clients,) float64 mean training loss over all steps taken, penalties included; NaN where a client
            did not take part.
        """

    @abstractmethod
    def evaluate(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Return accuracy and mean loss of each model (local clients, d) on its client's test samples.

        Both are (local clients,) float64 on the CPU.
        """

"""What a local-training engine is: it takes the models that were sent and returns what the clients made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

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


class Engine(ABC):
    """Trains and evaluates the clients of this process.

    Engines differ in speed alone: batches are drawn by one generator per (seed, round, client), so that every engine
    sees the same samples in the same order and returns the same models up to rounding.
    """

    name: str

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

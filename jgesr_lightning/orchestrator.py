"""The round orchestrator: collects the clients' models into the matrix that is uploaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from jgesr_lightning.layout import ParameterLayout


class RoundOrchestrator:
    """First in the list of callbacks, and the only writer of the matrix of trained models.

    Engines hand over rows; the state dict of a client is made only where a callback asks for it, by having the hook
    ``on_client_trained(row, client, state_dict)``.

    Args:
        layout: order of the columns.
        observers: the other callbacks of the run.

    Attributes:
        trained: (clients of this process, d): after a round's training, one row a client. A client that sat out has
            the model it would have started from.
        asked: whether a callback asks for state dicts.
    """

    def __init__(self, layout: ParameterLayout, observers: Iterable[object] = ()) -> None:
        self.layout = layout
        self.trained = torch.empty(0, layout.size)
        self.asked = any(callable(getattr(observer, "on_client_trained", None)) for observer in observers)

    def on_round_start(self, round_number: int, sent: Tensor) -> None:
        """Begin with what the clients start from, (clients of this process, d): what was sent, or their own models."""
        if self.trained.shape != sent.shape or self.trained.dtype != sent.dtype or self.trained.device != sent.device:
            self.trained = torch.empty_like(sent)
        self.trained.copy_(sent)

    def on_client_delivered(self, row: int, client: int, model: Tensor) -> None:
        """Collect the model (d,) of the client in local row `row`."""
        self.trained[row].copy_(model)

    def state_dict(self, row: int) -> dict[str, Tensor]:
        """Return the collected model of local row `row` under its state-dict names: copies, for whoever wants them."""
        return self.layout.restore(self.trained[row].clone())

"""The round orchestrator: collects the clients' state dicts into the matrix that is uploaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jgesr_lightning.layout import ParameterLayout


class RoundOrchestrator:
    """First in the list of callbacks, and the only writer of the matrix of trained models.

    Args:
        layout: order of the columns.

    Attributes:
        trained: (clients of this process, d): after a round's training, one row a client. A client that sat out has
            the model it was sent.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout = layout
        self.trained = torch.empty(0, layout.size)

    def on_round_start(self, round_number: int, sent: Tensor) -> None:
        """Start from what the server sent, (clients of this process, d)."""
        if self.trained.shape != sent.shape or self.trained.dtype != sent.dtype or self.trained.device != sent.device:
            self.trained = torch.empty_like(sent)
        self.trained.copy_(sent)

    def on_client_trained(self, row: int, client: int, state_dict: Mapping[str, Tensor]) -> None:
        """Collect the state dict of the client in local row `row`."""
        self.layout.flatten(state_dict, out=self.trained[row])

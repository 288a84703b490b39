"""No aggregation: every client keeps its own model."""

from __future__ import annotations

from typing import ClassVar

import torch

from jgesr_lightning.aggregators.base import OWNS, Aggregate, Aggregator, Upload, complete, kept
from jgesr_lightning.checks import one_of


class Local(Aggregator):
    """``psi_k = x_k``: what arrived; where nothing did, what was sent last round (see `base.complete`).

    Args:
        own: "received", what the channel made of it; "clean", what the client trained, as if there were no channel.
    """

    name: ClassVar[str] = "local"
    shares: ClassVar[bool] = False

    def __init__(self, own: str = "received") -> None:
        super().__init__()
        one_of("own", own, OWNS)
        self.own = own

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return what arrived, with gaps filled."""
        identity = torch.eye(len(upload.clients), dtype=torch.float64)
        return Aggregate(complete(upload), identity, own=kept(upload) if self.own == "clean" else None)

"""No aggregation: every client keeps its own model."""

from __future__ import annotations

from typing import ClassVar

import torch

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, complete


class Local(Aggregator):
    """``psi_k = x_k``: what arrived; where nothing did, what was sent last round (see `base.complete`)."""

    name: ClassVar[str] = "local"
    shares: ClassVar[bool] = False

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return what arrived, with gaps filled."""
        return Aggregate(complete(upload), torch.eye(len(upload.clients), dtype=torch.float64))

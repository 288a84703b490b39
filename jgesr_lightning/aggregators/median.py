"""Coordinate-wise median: one model for all, which a minority of wild uploads cannot move far."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, complete
from jgesr_lightning.checks import flag
from jgesr_lightning.graph.gram import chunks


class Median(Aggregator):
    """Each coordinate is the median of what arrived of it (Yin et al., ICML 2018, Definition 1).

    The mean of the two middle values where they are two; the previous value where nothing arrived. Entry (k, j) of the
    graph, the same for all k, is the fraction of coordinates for which client j supplied the median.

    Args:
        weighted: let clients count by their share of samples instead of equally. The plain median withstands wild
            uploads from fewer than half of the clients, the weighted one from less than half of the samples.
    """

    name: ClassVar[str] = "median"

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        flag("weighted", weighted)
        self.weighted = weighted

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return the median in every row."""
        received, count = upload.received, len(upload.clients)
        weights = upload.weights if self.weighted else torch.ones_like(upload.weights)
        weights = weights.to(received.device)
        mask = upload.mask
        models = torch.empty_like(received, memory_format=torch.contiguous_format)
        supplied = torch.zeros(count, dtype=torch.float64, device=received.device)
        for _, columns in chunks(models.shape[1:], 4 * count, models.device):  # sorting takes as much again thrice
            values = received[:, columns].T  # (c, P)
            shares = weights.expand(values.shape)
            if mask is not None:
                arrived = mask[:, columns].T
                values, shares = torch.where(arrived, values, torch.inf), torch.where(arrived, shares, 0)
            middle, suppliers, any_arrived = weighted_median(values, shares)
            models[:, columns] = middle
            for supplier in suppliers:
                supplied += torch.bincount(supplier[any_arrived], minlength=count) / 2
        if mask is not None and not bool(mask.any(0).all()):
            models = torch.where(mask.any(0), models, complete(upload))
        supplied = upload.reduce(supplied).cpu()
        shares = supplied / supplied.sum() if float(supplied.sum()) > 0 else upload.weights
        return Aggregate(models, shares.expand(count, count).clone())


def weighted_median(values: Tensor, shares: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return the median along the last dimension, who supplied it, and whether there was anything.

    Args:
        values: (c, P); +inf where nothing arrived.
        shares: (c, P) float64, non-negative; 0 where nothing arrived.

    Returns:
        (c,) mean of the lower and upper median; (c,) indices of each; (c,) bool, False where all shares are zero (the
        other results mean nothing there).
    """
    ordered, order = values.sort(dim=-1)
    cumulative = shares.gather(-1, order).cumsum(-1)
    total = cumulative[:, -1:]
    slack = 1e-12 * total  # shares are rounded: a tie at one half must stay a tie
    last = values.shape[-1] - 1
    lower = (cumulative < total / 2 - slack).sum(-1, keepdim=True).clamp_max(last)
    upper = (cumulative <= total / 2 + slack).sum(-1, keepdim=True).clamp_max(last)
    low, high = ordered.gather(-1, lower).squeeze(-1), ordered.gather(-1, upper).squeeze(-1)
    middle = torch.where(low == high, low, low / 2 + high / 2)
    suppliers = (order.gather(-1, lower).squeeze(-1), order.gather(-1, upper).squeeze(-1))
    return middle, suppliers, total.squeeze(-1) > 0

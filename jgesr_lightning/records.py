"""What a run remembers of each round: plain numbers, so that files, W&B and checkpoints all read the same record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class RoundRecord:
    """One round, as logged.

    Attributes:
        round: 0 is before any training.
        metrics: one number a name. ``accuracy/received*`` is measured on what the server sends after the round,
            ``accuracy/trained*`` on what clients hold after local training, before the uplink.
        clients: one list of K numbers a name.
        info: the aggregation's diagnostics.
    """

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, list[float]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers."""
        return asdict(self)


def summarise(prefix: str, values: Tensor, weights: Tensor) -> dict[str, float]:
    """Return the means, spread and tail of a client-wise figure of merit.

    Args:
        prefix: name of the unweighted mean; the others append to it.
        values: (K,) one number a client.
        weights: (K,) non-negative, number of samples behind each.

    Returns:
        Mean over clients, sample-weighted mean (``_weighted``), population standard deviation (``_std``), worst client
        (``_worst``) and mean of the worst tenth of the clients, at least one (``_worst_decile``).
    """
    values = values.to(torch.float64)
    tail = values.sort().values[: math.ceil(len(values) / 10)]
    return {
        prefix: float(values.mean()),
        f"{prefix}_weighted": float((values * weights).sum() / weights.sum()),
        f"{prefix}_std": float(values.std(unbiased=False)),
        f"{prefix}_worst": float(values.min()),
        f"{prefix}_worst_decile": float(tail.mean()),
    }

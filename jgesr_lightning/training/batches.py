"""Which samples a client sees in which order: the one rule that all engines share."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.seeding import BATCHES, generator


def epoch_orders(size: int, epochs: int, seed: int, round_number: int, client: int) -> Tensor:
    """Return (epochs, size) int64: the order of a client's samples in each local epoch of a round.

    Consecutive batches are consecutive slices; the last one of an epoch may be short.
    """
    draw = generator(seed, BATCHES, round_number, client)
    return torch.stack([torch.randperm(size, generator=draw) for _ in range(epochs)])

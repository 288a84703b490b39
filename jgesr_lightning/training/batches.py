"""Which samples a client sees in which order, and what makes up a step: the one rule that all engines share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from jgesr_lightning.seeding import BATCHES, generator

BatchSize = int | Literal["full"]
"""Samples a gradient step; "full": all of a client's, one step an epoch."""

PART = {"cpu": 64}
"""Samples of a full step that are computed at once, by kind of device; others: 512. Small enough for a CPU's cache."""


def visit_orders(size: int, epochs: int, batch_size: BatchSize, seed: int, round_number: int, client: int) -> Tensor:
    """Return (epochs, size) int64: the order of a client's samples in each local epoch of a round.

    Consecutive batches are consecutive slices; the last one of an epoch may be short. A full step needs no order of its
    own: the samples stay as they are, and nothing is drawn.
    """
    if batch_size == "full":
        return torch.arange(size).expand(epochs, -1)
    draw = generator(seed, BATCHES, round_number, client)
    return torch.stack([torch.randperm(size, generator=draw) for _ in range(epochs)])


def split(order: Tensor, size: int, least: int = 1) -> list[Tensor]:
    """Return consecutive slices of `size` samples; a last one of fewer than `least` is joined to the one before."""
    slices = list(order.split(size))
    if len(slices) > 1 and len(slices[-1]) < least:
        slices[-2:] = [torch.cat(slices[-2:])]
    return slices


def part_size(batch_size: BatchSize, device_type: str) -> int:
    """Return the samples that are computed at once: a batch, or a part of a full step."""
    return PART.get(device_type, 512) if batch_size == "full" else batch_size


def steps_of(size: int, batch_size: BatchSize) -> int:
    """Return the gradient steps that a client with `size` samples takes in an epoch."""
    return 1 if batch_size == "full" else -(-size // batch_size)

"""Passes over the columns of the K x d models: chunks, the type they are computed in, and what fills a gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CHUNK_BYTES_CPU = 1 << 22  # in the last-level cache; smaller ones cost more in calls than nearer caches save
_CHUNK_BYTES_ACCELERATOR = 1 << 26  # few launches, and still far less than the matrix itself


def chunks(
    widths: Sequence[int], rows: int, device: torch.device, columns: int | None = None
) -> Iterator[tuple[int, slice]]:
    """Yield (layer, slice of columns), no more columns at a time than make `rows` rows in float64 handy on `device`.

    Args:
        widths: number of columns of each layer, which no chunk crosses.
        rows: of all that is touched at once.
        device: where the columns lie.
        columns: at a time; None: as fits.
    """
    size = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES_ACCELERATOR
    most = columns or max(1024, size // (8 * max(1, rows)) // 1024 * 1024)
    begin = 0
    for layer, width in enumerate(widths):
        for start in range(begin, begin + width, most):
            yield layer, slice(start, min(start + most, begin + width))
        begin += width


def work_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type models are computed in: float64 for float64, float32 for all narrower ones."""
    return torch.promote_types(tensor.dtype, torch.float32)


def fill_gaps(received: Tensor, mask: Tensor, weights: Tensor, previous: Tensor | None) -> Tensor:
    """Return what arrived; elsewhere `previous`; without it the mean of those who delivered the column, or zero.

    Args:
        received: (..., K, c); not read where nothing arrived.
        mask: (..., K, c) bool, True where an entry arrived.
        weights: (..., K) of the mean.
        previous: (..., K, c) or None.

    Returns:
        (..., K, c), own memory, dtype of `received`.
    """
    filler = column_means(received, mask, weights) if previous is None else previous
    return torch.where(mask, received, filler.to(received.dtype))


def column_means(received: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each column over those who delivered it, zero where nobody did: (..., 1, c) float64."""
    arrived = torch.where(mask, received, 0).to(torch.float64)
    shares = weights.to(arrived.device)[..., None] * mask
    total = shares.sum(-2, keepdim=True)
    return (shares * arrived).sum(-2, keepdim=True) / total.clamp_min(torch.finfo(torch.float64).tiny)

"""Distances and cosines between the participants' models, from one pass over the columns each process holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Reduce
from jgesr_lightning.graph import cosine_from_gram, distances_from_gram, gram


def reduced_gram(
    models: Tensor, reduce: Reduce, *, minus: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return ``(G, s)`` with ``s^2 G`` the Gram matrix of the rows of ``models - minus`` over all processes' columns.

    s is 1 unless squares would overflow or vanish in float64; then it is about the largest entry.

    Args:
        models: (P, d).
        reduce: sums over the processes that hold the other columns.
        minus: (P, d) or (d,), subtracted.
        mask: (P, d) bool; entries where it is False count as zero.

    Returns:
        G (P, P) float64 on the CPU, and s.

    Raises:
        ValueError: a value is not finite.
    """
    plain = reduce(gram(models, minus=minus, mask=mask)).cpu()
    if bool(torch.isfinite(plain).all()) and float(plain.diagonal().max()) > 1e-200:
        return plain, 1.0
    # Halves, since the difference of two finite numbers may itself overflow.
    half = models.to(torch.float64) * 0.5
    half = half if minus is None else half - minus.to(torch.float64) * 0.5
    half = half if mask is None else torch.where(mask, half, 0)
    peak = half.abs().amax() if half.numel() else half.sum()
    largest = float(reduce(peak.reshape(1) / 1024))  # a sum over processes: near enough to a maximum
    if not math.isfinite(largest):
        raise ValueError("received holds values that are not finite")
    if largest == 0:
        return torch.zeros_like(plain), 1.0
    unit = math.ldexp(1.0, math.floor(math.log2(largest)))  # a power of two scales without rounding
    return reduce(gram(half / unit)).cpu(), 2 * unit


def sq_distances(models: Tensor, reduce: Reduce) -> Tensor:
    """Return (P, P) float64 squared Euclidean distances between the rows of `models` (P, d), on the CPU.

    Distances beyond 1e300 are 1e300, so that they stay finite.
    """
    # Relative to the first model, so that what all have in common does not eat the digits.
    found, scale = reduced_gram(models, reduce, minus=models[0])
    distances: Tensor = distances_from_gram(found) * scale * scale
    return distances.clamp_max(1e300)


def cosines(models: Tensor, reduce: Reduce, *, minus: Tensor | None = None) -> Tensor:
    """Return (P, P) float64 cosine similarities of the rows of ``models - minus``, on the CPU.

    The diagonal is exactly 1; the rows and columns of zero vectors are 0, diagonal included.

    Args:
        models: (P, d).
        reduce: sums over the processes that hold the other columns.
        minus: (P, d) or (d,), subtracted.
    """
    found, _ = reduced_gram(models, reduce, minus=minus)
    similarity: Tensor = cosine_from_gram(found)
    similarity.diagonal().copy_(found.diagonal() > 0)
    return similarity

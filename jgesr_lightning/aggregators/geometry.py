"""Distances and cosines between the participants' models, from one pass over the columns each process holds."""

from __future__ import annotations

from torch import Tensor

from jgesr_lightning.aggregators.base import Reduce
from jgesr_lightning.graph import cosine_from_gram, distances_from_gram, gram


def summed(products: Tensor, reduce: Reduce) -> Tensor:
    """Return Gram matrices over all processes' columns, on the CPU, from those over this one's.

    Raises:
        ValueError: they are not finite.
    """
    found = reduce(products).cpu()
    if not bool(found.isfinite().all()):
        raise ValueError("received holds values that are not finite, or whose squares are not")
    return found


def sq_distances(models: Tensor, reduce: Reduce) -> Tensor:
    """Return (P, P) float64 squared Euclidean distances between the rows of `models` (P, d), on the CPU."""
    # Relative to the first model, so that what all have in common does not eat the digits.
    distances: Tensor = distances_from_gram(summed(gram(models, minus=models[0]), reduce))
    return distances


def cosines(models: Tensor, reduce: Reduce, *, minus: Tensor | None = None) -> Tensor:
    """Return (P, P) float64 cosine similarities of the rows of ``models - minus``, on the CPU.

    The diagonal is exactly 1; the rows and columns of zero vectors are 0, diagonal included.

    Args:
        models: (P, d).
        reduce: sums over the processes that hold the other columns.
        minus: (P, d) or (d,), subtracted.
    """
    found = summed(gram(models, minus=minus), reduce)
    similarity: Tensor = cosine_from_gram(found)
    similarity.diagonal().copy_(found.diagonal() > 0)
    return similarity

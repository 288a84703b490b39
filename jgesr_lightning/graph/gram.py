"""Passes over the columns of the K x d models: chunks, what fills a gap, and Gram matrices with what they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, of, positive_part, set_diagonal
from jgesr_lightning.graph.laplacian import check_models, pairs

TINY = 1e-30  # a smaller sum of squares in float32 has lost terms
BLOCK = 8192  # columns of one product: what single precision sums before the sum goes on in double
_CHUNK_BYTES_CPU = 1 << 22  # a core's own cache holds half of it, in float32; smaller ones cost more in calls
_CHUNK_BYTES_ACCELERATOR = 1 << 26  # few launches, and still far less than the matrix itself


def chunks(widths: Sequence[int], rows: int, device: torch.device) -> Iterator[tuple[int, slice]]:
    """Yield (layer, slice of columns), no chunk crossing from one of the layers, of these `widths`, to the next.

    A chunk has as many columns as make `rows` rows, of all that is touched at once, in float64 handy on the device.
    """
    size = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES_ACCELERATOR
    most = max(1024, size // (8 * max(1, rows)) // 1024 * 1024)
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

    All are (..., K, c), but the `weights` of the mean (..., K). Of `received` what did not arrive is not read; the
    result has its dtype, on memory of its own.
    """
    filler = column_means(received, mask, weights) if previous is None else previous
    return torch.where(mask, received, filler.to(received.dtype))


def column_means(received: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each column over those who delivered it, zero where nobody did: (..., 1, c) float64."""
    arrived = torch.where(mask, received, 0).to(torch.float64)
    shares = weights.to(arrived.device)[..., None] * mask
    total = shares.sum(-2, keepdim=True)
    return (shares * arrived).sum(-2, keepdim=True) / total.clamp_min(torch.finfo(torch.float64).tiny)


def gram(X: Tensor, *, minus: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    r"""Return the Gram matrix of the rows, :math:`(M * (X - R)) (M * (X - R))^\top`.

    Products and sums are float64 whatever the type of `X`, and no more than one chunk of columns is ever copied. Where
    columns are shared out over processes this is one process's part: the sum over processes is the caller's.

    Args:
        X: (..., K, d) floating point.
        minus: R, (..., K, d) or (d,) or anything that broadcasts to `X`; None: zero. Subtracting what the rows share
            before multiplying is what keeps the digits of their differences.
        mask: M, (..., K, d) bool; entries where it is False count as zero, whatever they hold. None: all count.

    Returns:
        (..., K, K) float64, exactly symmetric, on the device of `X`.

    Raises:
        ValueError: `X` is not a floating-point matrix.
    """
    check_models("X", X)
    minus = None if minus is None else minus.expand_as(X)
    total = torch.zeros(*X.shape[:-1], X.shape[-2], dtype=torch.float64, device=X.device)
    for _, columns in chunks((X.shape[-1],), X.shape[:-1].numel(), X.device):
        part = X[..., columns].to(torch.float64)
        part = part if minus is None else part - minus[..., columns]
        part = part if mask is None else torch.where(mask[..., columns], part, 0)
        total += part @ part.mT
    symmetric: Tensor = (total + total.mT) / 2
    return symmetric


def self_product(part: Tensor) -> Tensor:
    """Return ``part @ part.mT`` of (..., K, c) in float64; on a CPU, blocks of float32 are summed in float32.

    Elsewhere float32 is widened first, since its products may be rounded to ten bits there (TF32).
    """
    if part.dtype == torch.float32 and part.device.type == "cpu":
        blocks = part.split(BLOCK, -1) if part.shape[-1] > BLOCK else [part]
        products = [(block @ block.mT).to(torch.float64) for block in blocks]
        total = products[0] if len(products) == 1 else torch.stack(products).sum(0)
        norms = total.numpy().diagonal(0, -2, -1)
        if norms.min(initial=1.0) > TINY and norms.max(initial=1.0) < torch.inf:
            return total
    wide = part.to(torch.float64)
    return wide @ wide.mT


def distances_from_gram(G: Array) -> Array:
    """Return squared distances ``G_mm + G_nn - 2 G_mn``: (..., K, K), symmetric, non-negative, zero diagonal.

    Rounding is relative to the largest G: centre the rows (``gram(X, minus=X.mean(0))``) if they share a large part.
    """
    distances = pairs(G.diagonal(0, -2, -1)) - (G + G.swapaxes(-1, -2))
    return set_diagonal(positive_part(distances), 0.0)


def cosine_from_gram(G: Array) -> Array:
    """Return cosines ``G_mn / sqrt(G_mm G_nn)`` in [-1, 1]: (..., K, K), symmetric whatever the product rounded.

    A zero row has cosine 0, with itself too.
    """
    norms = positive_part(G.diagonal(0, -2, -1)) ** 0.5
    inverse = 1 / of(G).where(norms > 0, norms, math.inf)
    cosines = G * (inverse[..., :, None] * inverse[..., None, :])
    return of(G).clip((cosines + cosines.swapaxes(-1, -2)) / 2, -1.0, 1.0)


def with_shared(augmented: Tensor) -> Tensor:
    """Return the Gram matrix of Y, (..., K, K), from that of ``[Y - 1 r'; r]``, (..., K + 1, K + 1)."""
    inner: Tensor = augmented[..., :-1, :-1] + pairs(augmented[..., :-1, -1]) + augmented[..., -1:, -1:]
    return inner


def pairwise_sq_distances(X: Tensor) -> Tensor:
    r"""Return :math:`D_{mn} = \|x_m - x_n\|^2` of the rows of `X` (..., K, d): (..., K, K) float64.

    The rows' mean is taken out before multiplying, so a large part that all share costs no digits.
    """
    check_models("X", X)
    distances: Tensor = distances_from_gram(gram(X, minus=X.mean(-2, keepdim=True)))
    return distances

"""Gram matrices of client models, and the distances and cosines they hold: one pass over d, float64 throughout."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.graph.laplacian import a_matrix

Array = npt.NDArray[Any]

_CHUNK_BYTES_CPU = 1 << 22  # in the last-level cache; smaller ones cost more in calls than nearer caches save
_ONE_BLAS_THREAD = "1" in (os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS"))
_TINY = 1e-30  # a smaller sum of squares in float32 has lost terms
_CHUNK_BYTES_ACCELERATOR = 1 << 26  # few launches, and still far less than the matrix itself


def chunk_columns(rows: int, device: torch.device) -> int:
    """Return how many columns to take at a time, so that `rows` of them in float64 make one chunk on `device`."""
    size = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES_ACCELERATOR
    columns = size // (8 * max(1, rows))
    return columns // 1024 * 1024 if columns >= 1024 else max(256, columns // 256 * 256)


def gram(X: Tensor, *, minus: Tensor | None = None, mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
    r"""Return the Gram matrix of the rows, :math:`(M * (X - R)) (M * (X - R))^\top`.

    Products and sums are float64 whatever the type of `X`, and no more than one chunk of columns is ever copied. Where
    columns are shared out over processes this is one process's part: the sum over processes is the caller's.

    Args:
        X: (..., K, d) floating point.
        minus: R, (..., K, d) or (d,) or anything that broadcasts to `X`; None: zero. Subtracting what the rows share
            before multiplying is what keeps the digits of their differences.
        mask: M, (..., K, d) bool; entries where it is False count as zero, whatever they hold. None: all count.
        chunk: columns at a time; None: as fits the device.

    Returns:
        (..., K, K) float64, exactly symmetric, on the device of `X`.

    Raises:
        ValueError: `X` is not a floating-point matrix.
    """
    a_matrix("X", X)
    rows, size = X.shape[-2:]
    chunk = chunk or chunk_columns(X.shape[:-1].numel(), X.device)
    total = torch.zeros(*X.shape[:-1], rows, dtype=torch.float64, device=X.device)
    for start in range(0, size, chunk):
        columns = slice(start, start + chunk)
        part = X[..., columns].to(torch.float64)
        if minus is not None:
            part = part - minus[..., columns]
        if mask is not None:
            part = torch.where(mask[..., columns], part, 0)
        total = total + self_product(part)
    return (total + total.mT) / 2


def self_product(part: Tensor) -> Tensor:
    """Return ``part @ part.mT`` in float64; float32 products are summed in float32 on a CPU, in float64 elsewhere.

    On a CPU with few threads numpy does it: its matrix product sees that both factors are one and computes half (twice
    as fast at K = 20). Elsewhere float32 is widened first, since its products may be rounded to ten bits there (TF32).
    """
    if numpy_is_faster(part):
        return torch.from_numpy(self_product_array(part.numpy()))
    if part.device.type == "cpu" and part.dtype == torch.float32:
        total = (part @ part.mT).to(torch.float64)
        norms = total.diagonal(dim1=-2, dim2=-1)
        if part.shape[-1] == 0 or (float(norms.min()) > _TINY and float(norms.max()) < float("inf")):
            return total
    wide = part.to(torch.float64)
    return wide @ wide.mT


@np.errstate(over="ignore", invalid="ignore")
def self_product_array(part: Array) -> Array:
    """Return ``part @ part.T`` in float64 for a (K, c) array, on the calling thread; see `self_product`."""
    total = np.zeros((len(part), len(part)))
    for block in _blocks(part, len(part)):
        total += block @ block.T
    norms = total.diagonal()
    if part.dtype == np.float64 or part.size == 0 or (norms.min() > _TINY and norms.max() < np.inf):
        return total
    return self_product_array(part.astype(np.float64))  # squares beyond the range of float32


def row_combinations(coefficients: Tensor, part: Tensor, out: Tensor) -> Tensor:
    """Write ``coefficients @ part``, float64 (M, K) times (K, c), into `out` (M, c), of the dtype of `part`; return it.

    In that dtype on a CPU; elsewhere in float64, see `self_product`.
    """
    if part.device.type != "cpu":
        return out.copy_(coefficients @ part.to(torch.float64))
    coefficients = coefficients.to(part.dtype)
    if not numpy_is_faster(part):
        return torch.mm(coefficients, part, out=out)
    combine_arrays(coefficients.numpy(), part.numpy(), out.numpy())
    return out


def combine_arrays(coefficients: Array, part: Array, out: Array) -> None:
    """Write ``coefficients @ part`` into `out`, arrays of one type, on the calling thread."""
    for source, target in zip(_blocks(part, len(part)), _blocks(out, len(part)), strict=True):
        np.matmul(coefficients, source, out=target)


def row_squares(part: Tensor) -> Tensor:
    """Return the squared norms of the rows of (K, c): (K,) float64; sums over a row are in the type of `part`."""
    if part.device.type == "cpu" and not part.requires_grad:
        return torch.from_numpy(row_squares_array(part.numpy()))
    squares: Tensor = torch.linalg.vecdot(part, part)
    return squares.to(torch.float64)


@np.errstate(over="ignore", invalid="ignore")
def row_squares_array(part: Array) -> Array:
    """Return the squared norms of the rows of a (K, c) array in float64; see `row_squares`."""
    squares = np.asarray((part[:, None, :] @ part[:, :, None])[:, 0, 0], dtype=np.float64)
    if part.dtype == np.float64 or not np.isinf(squares).any():
        return squares
    return row_squares_array(part.astype(np.float64))  # beyond the range of float32


class Scratch:
    """Buffers that a pass over chunks uses again and again: pages are mapped once, and stay in the cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the contiguous (rows, columns) buffer of that name; its contents are whatever was left there."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < rows * columns or memory.dtype != dtype:
            memory = torch.empty(rows * columns, dtype=dtype, device=self._device)
            self._memory[name] = memory
        return memory[: rows * columns].view(rows, columns)


def numpy_is_faster(part: Tensor) -> bool:
    """Whether products of `part` (K, c) with small matrices are better left to numpy than to torch."""
    if part.device.type != "cpu" or part.requires_grad or part.ndim != 2:
        return False
    return part.shape[0] < 64 and torch.get_num_threads() <= 2 and part.dtype in (torch.float32, torch.float64)


def _blocks(array: Array, rows: int) -> list[Array]:
    """Cut (K, c) into columns so few that numpy's BLAS multiplies them with `rows` rows on the calling thread.

    Its own threads know nothing of torch's number of threads, and on a machine that is busy otherwise they wait for
    each other a thousandfold.
    """
    if _ONE_BLAS_THREAD:
        return [array]
    width = 1 << max(0, ((1 << 19) // rows**2).bit_length() - 1)
    return [array[:, start : start + width] for start in range(0, array.shape[1], width)]


def distances_from_gram(G: Tensor) -> Tensor:
    """Return squared distances ``G_mm + G_nn - 2 G_mn``: (..., K, K), symmetric, non-negative, zero diagonal.

    Rounding is relative to the largest G: centre the rows (``gram(X, minus=X.mean(0))``) if they share a large part.
    """
    norms = G.diagonal(dim1=-2, dim2=-1)
    distances = (norms[..., :, None] + norms[..., None, :] - (G + G.mT)).clamp_min(0)
    return distances.masked_fill(torch.eye(G.shape[-1], dtype=torch.bool, device=G.device), 0)


def with_shared(augmented: Tensor) -> Tensor:
    """Return the Gram matrix of Y, (..., K, K), from that of ``[Y - 1 r'; r]``, (..., K + 1, K + 1)."""
    by_shared = augmented[..., :-1, -1]
    return augmented[..., :-1, :-1] + by_shared[..., :, None] + by_shared[..., None, :] + augmented[..., -1:, -1:]


def cosine_from_gram(G: Tensor) -> Tensor:
    """Return cosines ``G_mn / sqrt(G_mm G_nn)`` in [-1, 1]: (..., K, K); a zero row has cosine 0, with itself too."""
    norms = G.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms, 0)
    return (G * (inverse[..., :, None] * inverse[..., None, :])).clamp(-1, 1)


def pairwise_sq_distances(X: Tensor, *, chunk: int | None = None) -> Tensor:
    r"""Return :math:`D_{mn} = \|x_m - x_n\|^2` of the rows of `X` (..., K, d): (..., K, K) float64.

    The rows' mean is taken out before multiplying, so a large part that all share costs no digits.
    """
    a_matrix("X", X)
    return distances_from_gram(gram(X, minus=X.mean(-2, keepdim=True), chunk=chunk))

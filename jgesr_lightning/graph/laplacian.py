"""Laplacian algebra: degrees, Laplacians, and the list of edges behind a symmetric matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, set_diagonal


def a_tensor(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; got {type(value).__name__}")


def a_matrix(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a (..., K, d) floating-point tensor."""
    a_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.ndim < 2 or not value.is_floating_point():
        shape = tuple(value.shape)
        raise ValueError(f"{name} must be a (..., K, d) floating-point tensor; got {value.dtype} of shape {shape}")


def of_rows(name: str, value: object, rows: int, columns: int | None = None) -> None:
    """Raise ValueError unless `value` is a tensor of shape (..., rows), or (..., rows, columns)."""
    a_tensor(name, value)
    assert isinstance(value, Tensor)
    expected = (rows,) if columns is None else (rows, columns)
    if tuple(value.shape[-len(expected) :]) != expected:
        wanted = ", ".join(map(str, expected))
        raise ValueError(f"{name} must have shape (..., {wanted}); got {tuple(value.shape)}")


def symmetric_part(name: str, matrix: object) -> Tensor:
    """Return that of a (..., K, K) tensor as (N, K, K) float64, diagonal zero; ValueError for another."""
    a_tensor(name, matrix)
    assert isinstance(matrix, Tensor)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{name} must have shape (..., K, K); got {tuple(matrix.shape)}")
    nodes = matrix.shape[-1]
    if nodes < 2:
        raise ValueError(f"{name}: a graph needs at least 2 nodes; got {nodes}")
    given = matrix.detach().to(torch.float64).reshape(-1, nodes, nodes)
    symmetric = (given + given.mT) * 0.5
    symmetric.diagonal(dim1=-2, dim2=-1).zero_()
    if not bool(symmetric.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite")
    return symmetric


def degrees(W: Tensor) -> Tensor:
    r"""Return :math:`\deg = W 1`: (..., K)."""
    return W.sum(-1)


def laplacian(W: Array) -> Array:
    r"""Return :math:`L = \mathrm{diag}(W 1) - W`: (..., K, K), of the type of `W`, a tensor or an array.

    Its adjoint is `distances_from_gram`: ``<laplacian(W), G> = <w, d>`` over edges, with d the squared distances that
    the Gram matrix G holds. The diagonal of `W` is taken for zero.
    """
    off = set_diagonal(-W, 0.0)
    return set_diagonal(off, -off.sum(-1))


def upper_triangle(W: Tensor) -> Tensor:
    """Return the edges of `W` (..., K, K), row by row above the diagonal: (..., K (K - 1) / 2)."""
    rows, columns = torch.triu_indices(W.shape[-1], W.shape[-1], offset=1, device=W.device)
    return W[..., rows, columns]

"""Laplacian algebra: degrees, Laplacians, and the list of edges behind a symmetric matrix."""

from __future__ import annotations

import torch
from torch import Tensor


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


def degrees(W: Tensor) -> Tensor:
    r"""Return :math:`\deg = W 1`: (..., K)."""
    return W.sum(-1)


def degrees_adjoint(lam: Tensor) -> Tensor:
    r"""Return the adjoint of w -> deg: :math:`(B^\top\lambda)_{mn} = \lambda_m + \lambda_n`, zero diagonal.

    Over edges, ``<degrees(W), lam> = <w, degrees_adjoint(lam)>``.
    """
    pairs = lam[..., :, None] + lam[..., None, :]
    return pairs.masked_fill(torch.eye(lam.shape[-1], dtype=torch.bool, device=lam.device), 0)


def laplacian(W: Tensor) -> Tensor:
    r"""Return :math:`L = \mathrm{diag}(W 1) - W`: (..., K, K), dtype and device of `W`.

    Its adjoint is `distances_from_gram`: ``<laplacian(W), G> = <w, d>`` over edges, with d the squared distances that
    the Gram matrix G holds. The diagonal of `W` cancels.
    """
    a_tensor("W", W)
    return torch.diag_embed(degrees(W)) - W


def normalized_adjacency(W: Tensor) -> Tensor:
    r"""Return :math:`D^{-1/2} W D^{-1/2}`: (..., K, K); the rows of isolated nodes are zero."""
    deg = degrees(W)
    scale = torch.where(deg > 0, deg.clamp_min(torch.finfo(deg.dtype).tiny).rsqrt(), 0)
    return W * scale[..., :, None] * scale[..., None, :]


def upper_triangle(W: Tensor) -> Tensor:
    """Return the edges of `W` (..., K, K), row by row above the diagonal: (..., K (K - 1) / 2)."""
    rows, columns = torch.triu_indices(W.shape[-1], W.shape[-1], offset=1, device=W.device)
    return W[..., rows, columns]


def from_upper_triangle(w: Tensor, nodes: int) -> Tensor:
    """Return the symmetric matrix with edges `w` (..., K (K - 1) / 2) and zero diagonal: (..., K, K).

    Raises:
        ValueError: the number of edges is not that of `nodes` nodes.
    """
    if w.shape[-1] != nodes * (nodes - 1) // 2:
        raise ValueError(f"w must hold {nodes * (nodes - 1) // 2} edges for {nodes} nodes; got {w.shape[-1]}")
    rows, columns = torch.triu_indices(nodes, nodes, offset=1, device=w.device)
    W = w.new_zeros(*w.shape[:-1], nodes, nodes)
    W[..., rows, columns] = w
    return W + W.mT

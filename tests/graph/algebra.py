"""Algebra of graphs that the tests are written in."""

from __future__ import annotations

import torch
from torch import Tensor


def degrees(W: Tensor) -> Tensor:
    r"""Return :math:`\deg = W 1`: (..., K)."""
    return W.sum(-1)


def upper_triangle(W: Tensor) -> Tensor:
    """Return the edges of `W` (..., K, K), row by row above the diagonal: (..., K (K - 1) / 2)."""
    rows, columns = torch.triu_indices(W.shape[-1], W.shape[-1], offset=1, device=W.device)
    return W[..., rows, columns]


def degrees_adjoint(lam: Tensor) -> Tensor:
    r"""Return the adjoint of w -> deg: :math:`(B^\top\lambda)_{mn} = \lambda_m + \lambda_n`, zero diagonal.

    Over edges, ``<degrees(W), lam> = <w, degrees_adjoint(lam)>``.
    """
    pairs = lam[..., :, None] + lam[..., None, :]
    return pairs.masked_fill(torch.eye(lam.shape[-1], dtype=torch.bool, device=lam.device), 0)


def normalized_adjacency(W: Tensor) -> Tensor:
    r"""Return :math:`D^{-1/2} W D^{-1/2}`: (..., K, K); the rows of isolated nodes are zero."""
    deg = degrees(W)
    scale = torch.where(deg > 0, deg.clamp_min(torch.finfo(deg.dtype).tiny).rsqrt(), 0)
    return W * scale[..., :, None] * scale[..., None, :]


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

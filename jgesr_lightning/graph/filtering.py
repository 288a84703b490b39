"""Graph filtering: the minimiser of the joint objective over the models, for a fixed graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import blind
from jgesr_lightning.graph.gram import chunks, work_dtype
from jgesr_lightning.graph.laplacian import check_models, laplacian

_WIDTH = 1024  # columns that are solved together


def filter_signals(
    X: Tensor,
    W: Tensor,
    weights: Tensor,
    alpha: float,
    mu: float,
    *,
    mask: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    r"""Return :math:`\arg\min_\Psi \frac{\mu}{2} \|M * \Psi - M * X\|_Z^2 + \alpha\, \mathrm{tr}(\Psi^\top L \Psi)`.

    Without a mask this is the closed form :math:`(Z + \frac{2\alpha}{\mu} L)^{-1} Z X`. Limits: for block-diagonal L
    and large alpha, each cluster's weighted mean; for :math:`Z = I` and small :math:`c = 2\alpha/\mu`,
    :math:`X - c L X`, for the normalised Laplacian and c = 1 the one-hop filter :math:`D^{-1/2} W D^{-1/2} X`. With a
    mask every column has its own system :math:`(M_j Z + \frac{2\alpha}{\mu} L) \psi_j = M_j Z x_j`.

    Args:
        X: (..., K, d) floating point.
        W: (..., K, K) symmetric, non-negative.
        weights: diagonal of Z, (K,) or (..., K), positive.
        alpha: weight of the smoothness, non-negative.
        mu: weight of the fidelity, positive.
        mask: M, (..., K, d) bool; X is not read where it is False.
        start: (..., K, d) where the solution is sought from; matters only where the minimiser is not unique (a
            column that nobody in a connected part of the graph delivered). None: `X` with gaps at zero.

    Raises:
        ValueError: an argument of the wrong type, shape or value, with its name.

    Returns:
        Psi (..., K, d), own memory, dtype and device of `X`.
    """
    if not (alpha >= 0 and mu > 0 and math.isfinite(alpha + mu)):
        raise ValueError(f"alpha must be non-negative and mu positive, both finite; got {alpha}, {mu}")
    check_models("X", X, W=W, weights=weights, mask=mask, start=start)
    if not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError("weights must be positive and finite")
    z = weights.to(X.device, torch.float64)[..., None]
    S = (2 * alpha / mu) * laplacian(W.to(X.device, torch.float64))
    inverse = torch.linalg.inv(torch.diag_embed(z[..., 0]) + S)
    result = torch.empty_like(X, memory_format=torch.contiguous_format)
    for _, columns in chunks(X.shape[-1:], (1 if mask is None else 8) * X.shape[:-1].numel(), X.device):
        part = X[..., columns].to(torch.float64)
        if mask is None:
            shared = part.mean(-2, keepdim=True)
            smooth = shared + inverse @ (z * (part - shared))
        else:
            part = torch.where(mask[..., columns], part, 0)
            first = part if start is None else start[..., columns].to(torch.float64)
            smooth = solve_columns(S, inverse, z * mask[..., columns], z * part, first)
        result[..., columns] = smooth.to(work_dtype(X))
    return result


def solve_columns(S: Tensor, inverse: Tensor, z: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Return psi with ``(diag(z_j) + S) psi_j = right_j`` in every column j; the nearest to `start` if there are many.

    S is a scaled Laplacian and `inverse` that of the system without gaps, (..., K, K); z, zero in gaps, and the others
    are (..., K, c) float64. Columns are solved in groups that fit a core's own cache and have about equally many gaps,
    which say how many steps it takes.
    """
    psi = torch.empty_like(start)
    for columns in (z == 0).sum(-2, keepdim=True).argsort(-1).split(_WIDTH, -1):
        columns = columns.expand(*z.shape[:-1], -1)
        psi.scatter_(-1, columns, _conjugate_gradients(S, inverse, *(a.gather(-1, columns) for a in (z, right, start))))
    return psi


def _conjugate_gradients(S: Tensor, inverse: Tensor, z: Tensor, right: Tensor, psi: Tensor) -> Tensor:
    """See `solve_columns`; overwrites psi, from which it starts.

    What is left out where an entry is missing is of rank one, so that with p gaps there are p + 1 steps.
    """
    residual = right - torch.matmul(S, psi).addcmul_(z, psi)
    direction = ahead = inverse @ residual
    energy = (residual * ahead).sum(-2, keepdim=True)
    # Below this a residual is the rounding of the terms it is the difference of; following it would lead astray where
    # the system is singular (a part of the graph that delivered nothing of a column).
    terms = (right.abs() + z * psi.abs() + S.abs() @ psi.abs()).square().sum(-2, keepdim=True)
    bound = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]  # on its largest eigenvalue
    goal = (4 * torch.finfo(energy.dtype).eps) ** 2 * bound * terms
    for _ in range(right.shape[-2] + 5):
        going = energy > goal
        if not blind(energy) and not bool(going.any()):
            break
        image = torch.matmul(S, direction).addcmul_(z, direction)
        curvature = (direction * image).sum(-2, keepdim=True)
        size = torch.where(going & (curvature > 0), energy / curvature, 0)
        psi.addcmul_(size, direction)
        residual.addcmul_(size, image, value=-1)
        ahead = inverse @ residual
        new = (residual * ahead).sum(-2, keepdim=True)
        direction, energy = torch.addcmul(ahead, torch.where(going, new / energy, 0), direction), new
    return psi

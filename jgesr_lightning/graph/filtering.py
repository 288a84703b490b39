"""Graph filtering: the minimiser of the joint objective over the models, for a fixed graph."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import chunk_columns
from jgesr_lightning.graph.laplacian import laplacian


def filter_matrix(W: Tensor, weights: Tensor, alpha: float, mu: float) -> Tensor:
    r"""Return :math:`F = (Z + \frac{2\alpha}{\mu} L)^{-1} Z`: (..., K, K) float64; its rows sum to one.

    Args:
        W: (..., K, K) symmetric, non-negative.
        weights: diagonal of Z, (..., K), positive.
        alpha: weight of the smoothness.
        mu: weight of the fidelity.
    """
    z = weights.to(W.device, torch.float64)
    system = torch.diag_embed(z) + (2 * alpha / mu) * laplacian(W.to(torch.float64))
    return torch.cholesky_solve(torch.diag_embed(z), torch.linalg.cholesky(system))


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
    :math:`X - c L X`, which for the normalised Laplacian and c = 1 is the one-hop filter
    :math:`D^{-1/2} W D^{-1/2} X`.

    With a mask every column has its own system :math:`(M_j Z + \frac{2\alpha}{\mu} L) \psi_j = M_j Z x_j`. Conjugate
    gradients solve them side by side, with the inverse of the system without gaps as preconditioner: a column with p
    entries missing is then exact after p + 1 steps.

    Args:
        X: (..., K, d) floating point.
        W: (..., K, K) symmetric, non-negative.
        weights: diagonal of Z, (K,) or (..., K), positive.
        alpha: weight of the smoothness, non-negative.
        mu: weight of the fidelity, positive.
        mask: M, (..., K, d) bool; X is not read where it is False.
        start: (..., K, d) where the conjugate gradients begin; matters only where the minimiser is not unique (a
            column that nobody in a connected part of the graph delivered). None: `X` with gaps at zero.

    Returns:
        Psi (..., K, d), own memory, dtype and device of `X`.
    """
    if not (alpha >= 0 and mu > 0):
        raise ValueError(f"alpha must be non-negative and mu positive; got {alpha}, {mu}")
    work = torch.promote_types(X.dtype, torch.float32)
    F = filter_matrix(W.to(X.device), weights, alpha, mu)
    result = torch.empty_like(X, memory_format=torch.contiguous_format)
    z = weights.to(X.device, torch.float64)[..., None]
    copies = 1 if mask is None else 8  # of a chunk, that the conjugate gradients keep
    chunk = chunk_columns(copies * X.shape[:-1].numel(), X.device)
    L = (2 * alpha / mu) * laplacian(W.to(X.device, torch.float64))
    for begin in range(0, X.shape[-1], chunk):
        columns = slice(begin, begin + chunk)
        part = X[..., columns].to(torch.float64)
        if mask is None:
            shared = part.mean(-2, keepdim=True)
            smooth = shared + F @ (part - shared)
        else:
            arrived = mask[..., columns]
            part = torch.where(arrived, part, 0)
            first = part if start is None else start[..., columns].to(torch.float64)
            smooth = solve_columns(L, F / z.mT, z, arrived, part, first)
        result[..., columns] = smooth.to(work)
    return result


def solve_columns(L: Tensor, preconditioner: Tensor, z: Tensor, arrived: Tensor, x: Tensor, start: Tensor) -> Tensor:
    """Return psi with ``(M_j Z + L) psi_j = M_j Z x_j`` in every column j: preconditioned conjugate gradients.

    Args:
        L: (..., K, K) Laplacian, scaled.
        preconditioner: (..., K, K), the inverse of Z + L.
        z: (..., K, 1).
        arrived: M (..., K, c) bool.
        x: (..., K, c) float64, zero where nothing arrived.
        start: (..., K, c) first guess.
    """
    scale = z * arrived
    psi = start.clone()
    residual = scale * (x - psi) - L @ psi
    ahead = preconditioner @ residual
    direction = ahead
    energy = (residual * ahead).sum(-2, keepdim=True)
    # Below this a residual is the rounding of the terms it is the difference of; following it would lead astray where
    # the system is singular (a part of the graph that delivered nothing of a column).
    terms = (scale * (x.abs() + psi.abs()) + L.abs() @ psi.abs()).square().sum(-2, keepdim=True)
    bound = preconditioner.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]  # on its largest eigenvalue
    goal = (4 * torch.finfo(energy.dtype).eps) ** 2 * bound * terms
    for _ in range(x.shape[-2] + 5):
        if not bool((energy > goal).any()):
            break
        image = scale * direction + L @ direction
        curvature = (direction * image).sum(-2, keepdim=True)
        size = torch.where((energy > goal) & (curvature > 0), energy / curvature, 0)
        psi = psi + size * direction
        residual = residual - size * image
        ahead = preconditioner @ residual
        new = (residual * ahead).sum(-2, keepdim=True)
        direction = ahead + torch.where(energy > goal, new / energy, 0) * direction
        energy = new
    return psi

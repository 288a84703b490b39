"""Graph filtering: the minimiser of the joint objective over the models, for a fixed graph."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import hidden
from jgesr_lightning.graph.laplacian import a_matrix, laplacian, of_rows
from jgesr_lightning.graph.passes import chunks, work_dtype

_GROWTH = 1e4  # of rounding, in a column's gaps, from which they are not solved for directly


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

    With a mask every column has its own system :math:`(M_j Z + \frac{2\alpha}{\mu} L) \psi_j = M_j Z x_j`; see
    `solve_columns`.

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
    if not (alpha >= 0 and mu > 0):
        raise ValueError(f"alpha must be non-negative and mu positive; got {alpha}, {mu}")
    a_matrix("X", X)
    rows, size = X.shape[-2:]
    of_rows("W", W, rows, rows)
    of_rows("weights", weights, rows)
    for name, given in (("mask", mask), ("start", start)):
        if given is not None:
            of_rows(name, given, rows, size)
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be of type bool; got {mask.dtype}")
    z = weights.to(X.device, torch.float64)[..., None]
    L = (2 * alpha / mu) * laplacian(W.to(X.device, torch.float64))
    inverse = torch.linalg.inv(torch.diag_embed(z[..., 0]) + L)
    F = inverse * z.mT
    result = torch.empty_like(X, memory_format=torch.contiguous_format)
    copies = 1 if mask is None else 8  # of a chunk, that `solve_columns` keeps
    for _, columns in chunks((size,), copies * X.shape[:-1].numel(), X.device):
        part = X[..., columns].to(torch.float64)
        if mask is None:
            shared = part.mean(-2, keepdim=True)
            smooth = shared + F @ (part - shared)
        else:
            arrived = mask[..., columns]
            part = torch.where(arrived, part, 0)
            first = part if start is None else start[..., columns].to(torch.float64)
            smooth = solve_columns(L, inverse, z, arrived, z * part, first)
        result[..., columns] = smooth.to(work_dtype(X))
    return result


def solve_columns(
    L: Tensor,
    inverse: Tensor,
    z: Tensor,
    arrived: Tensor,
    right: Tensor,
    start: Tensor,
    *,
    always: Tensor | float = 0.0,
) -> Tensor:
    r"""Return psi with ``(M_j Z + A + L) psi_j = right_j`` in every column j.

    With :math:`B = (Z + A + L)^{-1}` the solution is that without gaps, its gaps S filled by the solution:

    .. math:: \psi = B\, r + (B Z)_{:S}\, \psi_S, \qquad (I - (B Z)_{SS})\, \psi_S = (B\, r)_S

    a system as small as the gaps of the column are few; columns with equally many are solved in one batch. B Z is
    non-negative with rows that sum to at most one, so the inverse of the small matrix is non-negative, too, and its
    image of ones is how much it magnifies rounding. Where that is much, or without bound (a part of the graph that
    delivered nothing of the column), conjugate gradients from `start` take over; on an accelerator, where nothing is
    looked at, they do it all.

    Args:
        L: (..., K, K) Laplacian, scaled.
        inverse: B, (..., K, K).
        z: (..., K, 1) what a gap takes from the diagonal.
        arrived: M (..., K, c) bool.
        right: (..., K, c) float64.
        start: (..., K, c) first guess.
        always: A, (K, 1): what a gap does not take from the diagonal.
    """
    if hidden(right):
        return conjugate_gradients(L, inverse, always + z * arrived, right, start)
    if right.ndim > 2:
        each = (
            a.expand(*right.shape[:-2], *a.shape[-2:]).flatten(0, -3) for a in (L, inverse, z, arrived, right, start)
        )
        return torch.stack([solve_columns(*one, always=always) for one in zip(*each, strict=True)]).view_as(right)
    rows = len(right)
    F = inverse * z.mT
    psi = inverse @ right
    gaps = (~arrived).sum(0)
    hard = gaps == rows
    for k in range(1, int(gaps.amax()) + 1 if gaps.numel() else 0):
        columns = (gaps == k).nonzero()[:, 0]
        if k == rows or len(columns) == 0:
            continue
        missing = (~arrived[:, columns]).mT.nonzero()[:, 1].view(-1, k)
        small = torch.eye(k, dtype=F.dtype) - F[missing[:, :, None], missing[:, None, :]]
        known = psi[missing, columns[:, None]]
        solved, singular = torch.linalg.solve_ex(small, torch.stack([known, torch.ones_like(known)], -1))
        filled, growth = solved.unbind(-1)
        psi[:, columns] += F @ torch.zeros_like(psi[:, columns]).scatter_(0, missing.mT, filled.mT)
        hard[columns] = (singular != 0) | ~(growth.abs().amax(-1) < _GROWTH)
    if bool(hard.any()):
        scale = always + z * arrived[:, hard]
        psi[:, hard] = conjugate_gradients(L, inverse, scale, right[:, hard], start[:, hard])
    return psi


def conjugate_gradients(L: Tensor, preconditioner: Tensor, scale: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Return psi with ``(scale + L) psi = right``, iteratively, from `start`: exact after p + 1 steps with p gaps."""
    psi = start.clone()
    residual = right - scale * psi - L @ psi
    ahead = preconditioner @ residual
    direction = ahead
    energy = (residual * ahead).sum(-2, keepdim=True)
    # Below this a residual is the rounding of the terms it is the difference of; following it would lead astray where
    # the system is singular (a part of the graph that delivered nothing of a column).
    terms = (right.abs() + scale * psi.abs() + L.abs() @ psi.abs()).square().sum(-2, keepdim=True)
    bound = preconditioner.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]  # on its largest eigenvalue
    goal = (4 * torch.finfo(energy.dtype).eps) ** 2 * bound * terms
    for _ in range(right.shape[-2] + 5):
        if not hidden(energy) and not bool((energy > goal).any()):
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

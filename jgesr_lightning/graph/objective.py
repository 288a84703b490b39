"""The joint problem as functions of the K x d models themselves: its value, gradients and split, in float64.

Differentiable, and batched over leading dimensions. What they compute is said by `graph.problem.Problem`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import pairwise_sq_distances
from jgesr_lightning.graph.laplacian import a_matrix, laplacian, of_rows, upper_triangle
from jgesr_lightning.graph.problem import Problem, Terms


def objective(
    Psi: Tensor,
    W: Tensor,
    received: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    mu: float,
) -> Tensor:
    r"""Return J, (...,) float64: the sum of `objective_terms`, which see."""
    total: Tensor = objective_terms(Psi, W, received, weights, mask, alpha, beta, gamma, mu).total
    return total


def objective_terms(
    Psi: Tensor,
    W: Tensor,
    received: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    mu: float,
) -> Terms:
    r"""Return the four terms of J.

    The fidelity is literally :math:`\frac\mu2 \sum_{kj} z_k (M_{kj} \psi_{kj} - x_{kj})^2`: what `received` holds where
    the mask is False counts, as in the paper, where it is noise that no Psi can change. The solvers leave it out, so
    their traces agree with this function where `received` is zero at the gaps.

    Args:
        Psi: (..., K, d).
        W: (..., K, K) symmetric, non-negative, zero diagonal. A client without edges makes the barrier infinite.
        received: X_r (..., K, d).
        weights: diagonal of Z, (K,) or (..., K), as they are (not normalised here).
        mask: M (..., K, d) bool, or None where everything arrived.
        alpha: weight of the smoothness.
        beta: weight of the log barrier.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity.

    Raises:
        ValueError: an argument of the wrong type or shape, with its name.
    """
    a_matrix("Psi", Psi)
    rows, size = Psi.shape[-2:]
    of_rows("W", W, rows, rows)
    of_rows("received", received, rows, size)
    of_rows("weights", weights, rows)
    if mask is not None:
        of_rows("mask", mask, rows, size)
    squares = _residual(Psi, received, mask).square().sum(-1) * weights.to(Psi.device, torch.float64)
    return Problem(alpha, beta, gamma, mu).terms(
        [mu * squares.sum(-1)], pairwise_sq_distances(Psi), W.to(torch.float64)
    )


def smoothness(Psi: Tensor, W: Tensor) -> Tensor:
    r"""Return :math:`\sum_e w_e d_e = \mathrm{tr}(\Psi^\top L \Psi) = \frac12 \mathrm{tr}(W D(\Psi))`: (...,)."""
    centred = _centre(Psi)
    smooth: Tensor = (centred * (laplacian(W.to(torch.float64)) @ centred)).sum((-1, -2))
    return smooth


def gradient_signals(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None, alpha: float, mu: float
) -> Tensor:
    r"""Return :math:`\partial J / \partial \Psi = \mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi`: (..., K, d)."""
    away = _residual(Psi, received, mask)
    z = mu * weights.to(Psi.device, torch.float64)[..., None]
    problem = Problem(alpha, mu=mu)
    S = problem.operator(W.to(torch.float64))
    # L does not see what all rows share, whose digits would drown the differences.
    gradient: Tensor = problem.gradient_models(_centre(Psi), S, [z], [away if mask is None else away * mask])
    return gradient


def gradient_graph(Psi: Tensor, W: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return :math:`\partial J / \partial w_{mn} = \alpha d_{mn}(\Psi) - \beta (1/\deg_m + 1/\deg_n) + \gamma`.

    The derivative by an *edge* (both of its entries in W together): (..., K, K) float64, zero diagonal.
    """
    gradient: Tensor = Problem(alpha, beta, gamma).gradient_graph(pairwise_sq_distances(Psi), W.to(torch.float64))
    return gradient


class Split(NamedTuple):
    """J = smooth + nonsmooth - concave, each (...,) float64 (f, g and h of the paper)."""

    smooth: Tensor
    nonsmooth: Tensor
    concave: Tensor


def difference_of_convex(
    Psi: Tensor,
    W: Tensor,
    received: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    mu: float,
) -> Split:
    r"""Return f, g, h with J = f + g - h, by :math:`2 \langle w, d\rangle = \|w + d\|^2 - \|w\|^2 - \|d\|^2`.

    .. math:: f = \text{fidelity} + \tfrac\alpha2 \|w + d\|^2, \quad
              g = -\beta \sum \log \deg + \gamma 1^\top w + [w \ge 0], \quad h = \tfrac\alpha2 (\|w\|^2 + \|d\|^2)

    See `objective_terms` for the arguments.
    """
    terms = objective_terms(Psi, W, received, weights, mask, alpha, beta, gamma, mu)
    w, d = upper_triangle(W.to(torch.float64)), upper_triangle(pairwise_sq_distances(Psi))
    outside = torch.where((w < 0).any(-1), torch.inf, 0.0)
    return Split(
        smooth=terms.fidelity + alpha / 2 * (w + d).square().sum(-1),
        nonsmooth=terms.barrier + terms.sparsity + outside,
        concave=alpha / 2 * (w.square().sum(-1) + d.square().sum(-1)),
    )


def _residual(Psi: Tensor, received: Tensor, mask: Tensor | None) -> Tensor:
    estimate = Psi.to(torch.float64)
    return (estimate if mask is None else torch.where(mask, estimate, 0)) - received.to(torch.float64)


def _centre(Psi: Tensor) -> Tensor:
    Psi = Psi.to(torch.float64)
    return Psi - Psi.mean(-2, keepdim=True)

"""The joint problem as functions of the K x d models, in float64: differentiable, batched; see `graph.problem`."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import pairwise_sq_distances
from jgesr_lightning.graph.laplacian import a_matrix, of_rows
from jgesr_lightning.graph.problem import Problem, Terms


def objective(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None,
    alpha: float, beta: float, gamma: float, mu: float,
) -> Tensor:  # fmt: skip
    r"""Return J, (...,) float64: the sum of `objective_terms`, which see."""
    total: Tensor = objective_terms(Psi, W, received, weights, mask, alpha, beta, gamma, mu).total
    return total


def objective_terms(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None,
    alpha: float, beta: float, gamma: float, mu: float,
) -> Terms:  # fmt: skip
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
    return Problem(alpha, beta, gamma, mu).terms([mu * squares.sum(-1)], pairwise_sq_distances(Psi), W.double())


def gradient_signals(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None, alpha: float, mu: float
) -> Tensor:
    r"""Return :math:`\partial J / \partial \Psi = \mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi`: (..., K, d)."""
    away, problem = _residual(Psi, received, mask), Problem(alpha, mu=mu)
    z = mu * weights.to(Psi.device, torch.float64)[..., None]
    # L does not see what all rows share, whose digits would drown the differences.
    apart = Psi.double() - Psi.double().mean(-2, keepdim=True)
    away = away if mask is None else away * mask
    gradient: Tensor = problem.gradient_models(apart, problem.operator(W.double()), [z], [away])
    return gradient


def gradient_graph(Psi: Tensor, W: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return :math:`\partial J / \partial w_{mn} = \alpha d_{mn}(\Psi) - \beta (1/\deg_m + 1/\deg_n) + \gamma`.

    The derivative by an *edge* (both of its entries in W together): (..., K, K) float64, zero diagonal.
    """
    gradient: Tensor = Problem(alpha, beta, gamma).gradient_graph(pairwise_sq_distances(Psi), W.double())
    return gradient


def _residual(Psi: Tensor, received: Tensor, mask: Tensor | None) -> Tensor:
    return (Psi.double() if mask is None else torch.where(mask, Psi.double(), 0)) - received.double()

r"""The joint objective term by term, its gradients, and the difference of convex functions it is split into.

.. math:: J(\Psi, w) = \underbrace{\tfrac\mu2 \|M * \Psi - X_r\|_Z^2}_{\text{fidelity}}
          + \underbrace{\alpha \textstyle\sum_e w_e d_e(\Psi)}_{\text{smoothness}}
          \underbrace{- \beta \textstyle\sum_k \log \deg_k(w)}_{\text{barrier}}
          + \underbrace{\gamma \textstyle\sum_e w_e}_{\text{sparsity}}, \qquad w \ge 0

Sums over e run over edges, each pair of clients once; W is symmetric with zero diagonal and holds every edge twice.
Everything is computed in float64, differentiable, and batched over leading dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import pairwise_sq_distances
from jgesr_lightning.graph.laplacian import a_matrix, degrees, laplacian, of_rows, upper_triangle


class Terms(NamedTuple):
    """The terms of J, each (...,) float64."""

    fidelity: Tensor
    smoothness: Tensor
    barrier: Tensor
    sparsity: Tensor

    @property
    def total(self) -> Tensor:
        """J, their sum."""
        return self.fidelity + self.smoothness + self.barrier + self.sparsity


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
    return objective_terms(Psi, W, received, weights, mask, alpha, beta, gamma, mu).total


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
    W = W.to(torch.float64)
    weighted = _fidelity_residual(Psi, received, mask).square().sum(-1) * weights.to(W)
    return Terms(
        fidelity=mu / 2 * weighted.sum(-1),
        smoothness=alpha * smoothness(Psi, W),
        barrier=-beta * degrees(W).log().sum(-1),
        sparsity=gamma * W.sum((-1, -2)) / 2,
    )


def smoothness(Psi: Tensor, W: Tensor) -> Tensor:
    r"""Return :math:`\sum_e w_e d_e = \mathrm{tr}(\Psi^\top L \Psi) = \frac12 \mathrm{tr}(W D(\Psi))`: (...,)."""
    centred = _centre(Psi)
    return (centred * (laplacian(W.to(torch.float64)) @ centred)).sum((-1, -2))


def gradient_signals(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None, alpha: float, mu: float
) -> Tensor:
    r"""Return :math:`\partial J / \partial \Psi = \mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi`: (..., K, d)."""
    residual = _fidelity_residual(Psi, received, mask) * weights.to(Psi.device, torch.float64)[..., None]
    if mask is not None:
        residual = residual * mask
    return mu * residual + 2 * alpha * (laplacian(W.to(torch.float64)) @ _centre(Psi))


def gradient_graph(Psi: Tensor, W: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return :math:`\partial J / \partial w_{mn} = \alpha d_{mn}(\Psi) - \beta (1/\deg_m + 1/\deg_n) + \gamma`.

    The derivative by an *edge* (both of its entries in W together): (..., K, K) float64, zero diagonal.
    """
    inverse = 1 / degrees(W.to(torch.float64))
    pairs = alpha * pairwise_sq_distances(Psi) - beta * (inverse[..., :, None] + inverse[..., None, :]) + gamma
    return pairs.masked_fill(torch.eye(W.shape[-1], dtype=torch.bool, device=W.device), 0)


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


def _fidelity_residual(Psi: Tensor, received: Tensor, mask: Tensor | None) -> Tensor:
    estimate = Psi.to(torch.float64)
    return (estimate if mask is None else torch.where(mask, estimate, 0)) - received.to(torch.float64)


def _centre(Psi: Tensor) -> Tensor:
    """Take out what all rows share: L does not see it, and its digits would drown the differences."""
    Psi = Psi.to(torch.float64)
    return Psi - Psi.mean(-2, keepdim=True)

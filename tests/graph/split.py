"""The split of J into convex functions, and its smoothness by another formula: what the mathematics is checked with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.graph import laplacian, objective, pairwise_sq_distances
from tests.graph.algebra import upper_triangle


def smoothness(Psi: Tensor, W: Tensor) -> Tensor:
    r"""Return :math:`\sum_e w_e d_e = \mathrm{tr}(\Psi^\top L \Psi) = \frac12 \mathrm{tr}(W D(\Psi))`: (...,)."""
    centred = Psi.double() - Psi.double().mean(-2, keepdim=True)
    smooth: Tensor = (centred * (laplacian(W.to(torch.float64)) @ centred)).sum((-1, -2))
    return smooth


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

    See `objective` for the arguments.
    """
    given = Psi, W, received, weights, mask
    fidelity = objective(*given, 0.0, 0.0, 0.0, mu)
    barrier, sparsity = objective(*given, 0.0, beta, 0.0, 0.0), objective(*given, 0.0, 0.0, gamma, 0.0)
    w, d = upper_triangle(W.to(torch.float64)), upper_triangle(pairwise_sq_distances(Psi))
    outside = torch.where((w < 0).any(-1), torch.inf, 0.0)
    return Split(
        smooth=fidelity + alpha / 2 * (w + d).square().sum(-1),
        nonsmooth=barrier + sparsity + outside,
        concave=alpha / 2 * (w.square().sum(-1) + d.square().sum(-1)),
    )

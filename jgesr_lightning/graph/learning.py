"""Learning a graph from squared distances, without the quadratic term of the prox: Kalofolias' log-degree model."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.graph.prox import Array, prox_arrays, symmetric_part

_MAX_ROUNDS = 60
_PRECISION = 1e-12
_ACCEPTED = 1e-6  # failure of the optimality conditions, relative to their terms, that goes without a warning
_DEAREST = 1e8  # times the median cost: dearer edges count as this, since double precision cannot tell their weights


class GraphNotConverged(UserWarning):
    """The graph that `learn_graph` returns is not the minimiser."""


def learn_graph(sq_distances: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return :math:`\arg\min_{w \ge 0} \alpha \langle w, d\rangle - \beta \sum_k \log \deg_k(w) + \gamma 1^\top w`.

    Sums over w run over edges. Kalofolias (2016), eq. 12 without the Frobenius term, and the w-part of the joint
    objective J for fixed Psi. With :math:`c = \alpha d + \gamma` the solution is :math:`\beta W_1(c)`, and
    :math:`W_1(\kappa c) = W_1(c) / \kappa`. Where the minimiser is not unique (the objective is strictly convex in the
    degrees only), one that treats equal nodes alike is returned. An edge that costs more than 1e8 times the median
    counts as costing that.

    Args:
        sq_distances: D (..., K, K) symmetric, finite; its diagonal is not read.
        alpha: weight of the distances, non-negative.
        beta: weight of the log barrier, positive.
        gamma: weight of the sum of the edges, non-negative.

    Returns:
        W (..., K, K) float64 on the device of `sq_distances`: symmetric, non-negative, zero diagonal, positive degrees.

    Raises:
        ValueError: a value out of range, K < 2, or an edge that costs nothing (``alpha d + gamma <= 0``: no minimum).

    Warns:
        GraphNotConverged: costs so far apart that the optimality conditions do not hold to 1e-6 of their terms.
    """
    if not (beta > 0 and alpha >= 0 and gamma >= 0 and math.isfinite(alpha + beta + gamma)):
        raise ValueError(f"beta must be positive, alpha and gamma non-negative; got {beta}, {alpha}, {gamma}")
    cost = alpha * symmetric_part("sq_distances", sq_distances) + gamma
    off = ~np.eye(cost.shape[-1], dtype=bool)
    if not (cost[:, off] > 0).all():
        raise ValueError("every edge needs a positive cost alpha d + gamma, or the minimum does not exist")
    W, _ = learn_arrays(cost, beta)
    left = _optimality(np.minimum(cost, _DEAREST * _typical(cost)), W, beta)
    if left > _ACCEPTED:
        warnings.warn(
            f"learn_graph has not converged: edges cost between {cost[:, off].min():.1e} and {cost[:, off].max():.1e}, "
            f"too far apart for double precision; the optimality conditions fail by {left:.1e} of their terms",
            GraphNotConverged,
            stacklevel=2,
        )
    return torch.from_numpy(W).view(sq_distances.shape).to(sq_distances.device)


def _typical(cost: Array) -> Array:
    """Return the median cost of an edge, (B, 1, 1)."""
    return np.asarray(np.median(cost[:, ~np.eye(cost.shape[-1], dtype=bool)], axis=-1)[:, None, None], np.float64)


def _optimality(cost: Array, W: Array, beta: float) -> float:
    """Return how far the optimality conditions fail at the worst edge, relative to the size of their terms."""
    off = ~np.eye(cost.shape[-1], dtype=bool)
    inverse = beta / W.sum(-1)
    gain = inverse[:, :, None] + inverse[:, None, :]
    gradient = ((cost - gain) / (cost + gain))[:, off]
    worst: float = np.where(W[:, off] > 0, np.abs(gradient), -gradient).max()
    return worst


def learn_arrays(cost: Array, beta: float, start: Array | None = None) -> tuple[Array, int]:
    r"""Return (W, Newton steps): the minimiser of :math:`\langle w, c \rangle - \beta \sum \log \deg` for a batch.

    Proximal-point iteration: each round is one exact prox around the last graph, ``rho (w+ - w)`` is what is left of
    the gradient, and rho falls tenfold a round, which makes convergence superlinear.

    Args:
        cost: c, (B, K, K) symmetric, positive off the diagonal.
        beta: weight of the log barrier.
        start: (B, K, K) graph to start from, such as the solution for neighbouring costs; None: no edges.
    """
    nodes = cost.shape[-1]
    off = ~np.eye(nodes, dtype=bool)
    # In units where the typical edge costs one and beta is one, the same schedule fits every instance.
    unit = _typical(cost)
    cost = np.minimum(cost / unit, _DEAREST)
    w = np.zeros_like(cost) if start is None else start * unit / beta
    # Weights reach the inverse of the cheapest cost, so that is how weak the pull to the last graph has to get; but not
    # so weak that the best edge of some node falls behind what the prox can still tell apart, 1e10 in its units.
    best = np.where(off, cost, np.inf).min(-1)
    floor = max(1e-8 * min(1.0, float(best.min())) ** 2, 1e-18 * float(best.max()) ** 2)
    rho, dual, steps = 1.0, None, 0
    for _ in range(_MAX_ROUNDS):
        new, dual, taken = prox_arrays(w - cost / rho, 1.0, 0.0, rho, dual)
        steps += taken
        # What is left of the gradient at an edge, beside the terms it is the difference of.
        left = float((rho * np.abs(new - w) / (np.abs(cost) + dual[:, :, None] + dual[:, None, :]))[:, off].max())
        w = new
        if left <= _PRECISION:
            break
        rho = max(rho / 10, floor)
    result: Array = w * (beta / unit)
    return result, steps

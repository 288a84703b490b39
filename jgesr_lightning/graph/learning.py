"""Learning a graph from squared distances, without the quadratic term of the prox: Kalofolias' log-degree model."""

from __future__ import annotations

import math
import warnings

import numpy as np
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, host, leave, like, of, set_diagonal
from jgesr_lightning.graph.interior_point import minimise_each
from jgesr_lightning.graph.laplacian import pairs, symmetric_part
from jgesr_lightning.graph.prox import QUIET, Prox, prox

_ACCEPTED = 1e-6  # failure of the optimality conditions, relative to their terms, that goes without a warning


class GraphNotConverged(UserWarning):
    """The graph that `learn_graph` returns is not the minimiser."""


def learn_graph(
    sq_distances: Tensor, alpha: float, beta: float, gamma: float, *, neighbours: int | None = None
) -> Tensor:
    r"""Return :math:`\arg\min_{w \ge 0} \alpha \langle w, d\rangle - \beta \sum_k \log \deg_k(w) + \gamma 1^\top w`.

    Sums over w run over edges. Kalofolias (2016), eq. 12 without the Frobenius term, and the w-part of the joint
    objective J for fixed Psi. Where the minimiser is not unique (the objective is strictly convex in the degrees only),
    one that treats equal nodes alike is returned.

    Args:
        sq_distances: D (..., K, K) symmetric, finite; its diagonal is not read.
        alpha: weight of the distances, non-negative.
        beta: weight of the log barrier, positive.
        gamma: weight of the sum of the edges, non-negative.
        neighbours: about how many edges a node is to have. The graph is then that of Kalofolias and Perraudin (ICLR
            2019), sqrt(beta) times the prox at ``-theta d``, with theta as `neighbour_scale` has it: alpha and gamma
            have no part in it.

    Returns:
        W (..., K, K) float64 on the device of `sq_distances`: symmetric, non-negative, zero diagonal, positive degrees.

    Raises:
        ValueError: a value out of range, K < 2, or an edge that costs nothing (``alpha d + gamma <= 0``: no minimum).

    Warns:
        GraphNotConverged: the optimality conditions do not hold to 1e-6 of their terms.
    """
    if not (beta > 0 and alpha >= 0 and gamma >= 0 and math.isfinite(alpha + beta + gamma)):
        raise ValueError(f"beta must be positive, alpha and gamma non-negative; got {beta}, {alpha}, {gamma}")
    D = enter(symmetric_part("sq_distances", sq_distances))
    if neighbours is not None:
        with QUIET():
            return leave(math.sqrt(beta) * prox(-neighbour_scale(D, neighbours) * D, 1.0, 0.0, 1.0, careful=True).W)
    cost = alpha * D + gamma
    least = set_diagonal(cost * 1, math.inf).min()
    if not least > 0:
        raise ValueError("every edge needs a positive cost alpha d + gamma, or the minimum does not exist")
    with QUIET():
        W = learn(cost, beta).W
    gain = pairs(beta / W.sum(-1))
    unmet = set_diagonal((gain - cost) / (gain + cost), 0.0)
    left = of(W).where(W > 0, abs(unmet), unmet).max()
    if not left <= _ACCEPTED:
        warnings.warn(
            f"learn_graph has not converged, for edges that cost between {least:.1e} and {cost.max():.1e}: "
            f"the optimality conditions fail by {left:.1e} of their terms",
            GraphNotConverged,
            stacklevel=2,
        )
    return leave(W)


def neighbour_scale(D: Array, neighbours: int) -> Array:
    r"""Return the theta, (..., 1, 1), for which :math:`\mathrm{prox}(-\theta d)` has about that many edges a node.

    For a node alone, whose distances in order are z and their sums b, k edges are active for theta between
    :math:`1 / \sqrt{k z^2 - b z}` at k + 1 and at k (Kalofolias and Perraudin, "Large scale graph learning from smooth
    signals", ICLR 2019, there for twice the sums over edges). The means of these over the nodes are where the search
    starts; a node also takes the edges that others want, so that theta is then sought by bisection. Where no theta
    leaves so few (one each, say, or several equal nodes), the least is taken that leaves about as few as any: at a
    larger one edges weigh less and less. It counts edges on the host, once an aggregation: on an accelerator the same
    steps would take longer than both ways.

    Raises:
        ValueError: `neighbours` is not a number from 1 to K - 1.
    """
    nodes = D.shape[-1]
    given = host(D).reshape(-1, nodes, nodes)
    if not 1 <= neighbours < nodes:
        raise ValueError(f"neighbours is {neighbours!r}; it must be from 1 to {nodes - 1}, one less than the clients")
    z = np.sort(set_diagonal(given * 1, math.inf), -1)[..., :-1]
    if nodes == 2:  # one edge at any scale: in units of its own
        return like(1 / np.where(z[:, :1] > 0, z[:, :1], 1.0), D).reshape(*D.shape[:-2], 1, 1)
    apart = z.max((1, 2)) > 0  # or all nodes are equal, and no scale tells them apart
    k, farthest = min(neighbours, nodes - 2), np.maximum(z.max((1, 2)), 1e-300)
    spread = ((np.arange(1, nodes) * z - z.cumsum(-1)) * z)[..., k - 1 : k + 1]
    # Of a node that has k others equally near, as for k = 1 each has, a bound is infinite: the rest say where to start.
    bounded = spread > 1e-30 * farthest[:, None, None] ** 2
    bounds = np.where(bounded, np.sqrt(2 / np.where(bounded, spread, 1)), 0).sum(1) / np.maximum(bounded.sum(1), 1)
    upper, lower = bounds.T
    lower = np.where(lower > 0, lower, 1 / farthest)
    theta = np.where(apart, np.sqrt(np.where(upper > 0, upper, lower) * lower), 1.0)
    low, high, tried = 0 * theta, math.inf + 0 * theta, []
    for _ in range(60):
        W = prox(-theta[:, None, None] * given, 1.0, 0.0, 1.0).W
        count = (W > 0).sum((1, 2)) / nodes
        tried.append((theta, count))
        off = apart & ~(abs(count - neighbours) < 0.5)
        if not off.any():
            break
        low, high = np.where(count > neighbours, theta, low), np.where(count > neighbours, high, theta)
        between = np.where(low == 0, theta / 2, np.where(high == math.inf, theta * 2, np.sqrt(low * high)))
        theta = np.where(off, between, theta)
    else:
        thetas, counts = np.stack(tried, 1)
        first = (counts < counts.min(0) + 0.5).argmax(0)[None]
        theta = np.where(off & (high == math.inf), np.take_along_axis(thetas, first, 0)[0], theta)
    return like(theta, D).reshape(*D.shape[:-2], 1, 1)


def learn(cost: Array, beta: float) -> Prox:
    r"""Return the minimisers of :math:`\langle w, c \rangle - \beta \sum \log \deg` for a batch.

    On the host, wherever the costs lie: some fifty steps take less time there than to launch them on an accelerator.
    What is not finite has no solution, and is not a number there.

    Args:
        cost: c, (..., K, K) symmetric, positive off the diagonal.
        beta: weight of the log barrier.
    """
    W, steps = minimise_each(host(cost) / beta)
    W = like(W, cost)
    return Prox(W, beta / W.sum(-1), True, steps)

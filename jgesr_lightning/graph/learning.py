"""Learning a graph from squared distances, without the quadratic term of the prox: Kalofolias' log-degree model."""

from __future__ import annotations

import math
import warnings

import numpy as np
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, blind, enter, host, leave, like, of, set_diagonal
from jgesr_lightning.graph.laplacian import pairs, symmetric_part
from jgesr_lightning.graph.prox import QUIET, Prox, looked_after, prox

_MAX_ROUNDS, _BLIND_ROUNDS = 60, 20
_PRECISION, _SEEN_LATER = 1e-12, 1e-11
_ACCEPTED = 1e-6  # failure of the optimality conditions, relative to their terms, that goes without a warning
_DEAREST = 1e8  # times the median cost: dearer edges count as this, since double precision cannot tell their weights


class GraphNotConverged(UserWarning):
    """The graph that `learn_graph` returns is not the minimiser."""


def learn_graph(
    sq_distances: Tensor, alpha: float, beta: float, gamma: float, *, neighbours: int | None = None
) -> Tensor:
    r"""Return :math:`\arg\min_{w \ge 0} \alpha \langle w, d\rangle - \beta \sum_k \log \deg_k(w) + \gamma 1^\top w`.

    Sums over w run over edges. Kalofolias (2016), eq. 12 without the Frobenius term, and the w-part of the joint
    objective J for fixed Psi. Where the minimiser is not unique (the objective is strictly convex in the degrees only),
    one that treats equal nodes alike is returned. An edge that costs over 1e8 times the median counts as costing that.

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
        GraphNotConverged: costs so far apart that the optimality conditions do not hold to 1e-6 of their terms.
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
        W = learn(cost, beta, careful=True).W
    gain = pairs(beta / W.sum(-1))
    counted = of(cost).minimum(cost, _DEAREST * _typical(cost))
    unmet = set_diagonal((gain - counted) / (gain + counted), 0.0)
    left = of(W).where(W > 0, abs(unmet), unmet).max()
    if not left <= _ACCEPTED:
        warnings.warn(
            f"learn_graph has not converged: edges cost between {least:.1e} and {cost.max():.1e}, "
            f"too far apart for double precision; the optimality conditions fail by {left:.1e} of their terms",
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


def _typical(cost: Array) -> Array:
    """Return the (lower) median cost of an edge, (..., 1, 1)."""
    flat = set_diagonal(cost * 1, math.inf).reshape(*cost.shape[:-2], 1, -1)
    ordered = flat.sort(-1)[0] if blind(cost) else np.sort(flat, -1)
    middle = cost.shape[-1] * (cost.shape[-1] - 1) // 2  # edges, each twice, come before the diagonal
    return ordered[..., middle - 1 : middle]


def learn(cost: Array, beta: float, start: Array | None = None, *, careful: bool = False) -> Prox:
    r"""Return the minimisers of :math:`\langle w, c \rangle - \beta \sum \log \deg` for a batch.

    Proximal-point iteration: each round is one exact prox around the last graph, ``rho (w+ - w)`` is what is left of
    the gradient, and rho falls tenfold a round, which makes convergence superlinear.

    Args:
        cost: c, (..., K, K) symmetric, positive off the diagonal.
        beta: weight of the log barrier.
        start: (..., K, K) graph to start from, such as the solution for neighbouring costs; None: no edges.
        careful: look even at an accelerator's numbers, and solve on the host what is not solved there.
    """
    xp, unseen, given = of(cost), blind(cost), (cost, beta, start)
    # In units where the typical edge costs one and beta is one, the same schedule fits every instance.
    unit = _typical(cost)
    cost = set_diagonal(xp.minimum(cost / unit, _DEAREST + 0 * unit), 0.0)
    w = 0 * cost if start is None else start * (unit / beta)
    # So few and so mild rounds that no prox needs care, or that the graph is reported as not solved.
    floor = 0.003
    if not unseen:
        # Weights reach the inverse of the cheapest cost, so that is how weak the pull to the last graph has to get; but
        # not so weak that the best edge of a node falls behind what the prox can tell apart, 1e10 in its units.
        best = set_diagonal(cost * 1, math.inf).min(-1)
        floor = max(1e-8 * min(1.0, float(best.min())) ** 2, 1e-18 * float(best.max()) ** 2)
    rho, dual, steps, solved = 1.0, None, 0, True
    for _ in range(_BLIND_ROUNDS if unseen else _MAX_ROUNDS):
        found = prox(w - cost / rho, 1.0, 0.0, rho, dual)
        dual, steps, solved = found.dual, steps + found.steps, solved & found.solved
        # What is left of the gradient at an edge, beside the terms it is the difference of.
        left = xp.amax(rho * abs(found.W - w) / (cost + pairs(dual)), (-1, -2))
        w = found.W
        if not unseen and left.max() <= _PRECISION:
            break
        rho = max(rho / 10, floor)
    found = Prox(w * (beta / unit), dual, solved & (left <= _SEEN_LATER) if unseen else True, steps)
    return looked_after(found, learn, *given) if careful else found

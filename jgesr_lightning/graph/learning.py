"""Learning a graph from squared distances, without the quadratic term of the prox: Kalofolias' log-degree model."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, blind, enter, host, leave, like, of, set_diagonal
from jgesr_lightning.graph.laplacian import symmetric_part
from jgesr_lightning.graph.prox import QUIET, Prox, prox

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
    objective J for fixed Psi. With :math:`c = \alpha d + \gamma` the solution is :math:`\beta W_1(c)`, and
    :math:`W_1(\kappa c) = W_1(c) / \kappa`. Where the minimiser is not unique (the objective is strictly convex in the
    degrees only), one that treats equal nodes alike is returned. An edge that costs more than 1e8 times the median
    counts as costing that.

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
    if neighbours is not None:
        D = enter(symmetric_part("sq_distances", sq_distances))
        with QUIET():
            found = prox(-neighbour_scale(D, neighbours) * D, 1.0, 0.0, 1.0, careful=True)
        return leave(found.W * math.sqrt(beta)).reshape(sq_distances.shape)
    cost = enter(alpha * symmetric_part("sq_distances", sq_distances) + gamma)
    least, most = set_diagonal(cost * 1, math.inf).min(), set_diagonal(cost * 1, 0.0).max()
    if not least > 0:
        raise ValueError("every edge needs a positive cost alpha d + gamma, or the minimum does not exist")
    with QUIET():
        W = learn(cost, beta, careful=True).W
    left = _failure(of(cost).minimum(cost, _DEAREST * _typical(cost)), W, beta)
    if left > _ACCEPTED:
        warnings.warn(
            f"learn_graph has not converged: edges cost between {least:.1e} and {most:.1e}, "
            f"too far apart for double precision; the optimality conditions fail by {left:.1e} of their terms",
            GraphNotConverged,
            stacklevel=2,
        )
    return leave(W).reshape(sq_distances.shape)


def neighbour_scale(D: Array, neighbours: int) -> Array:
    r"""Return the theta, (N, 1, 1), for which :math:`\mathrm{prox}(-\theta d)` has about that many edges a node.

    For a node alone, whose distances in order are z and their sums b, k edges are active for theta between
    :math:`1 / \sqrt{k z^2 - b z}` at k + 1 and at k (Kalofolias and Perraudin, "Large scale graph learning from smooth
    signals", ICLR 2019, there for twice the sums over edges). The means of these over the nodes are where the search
    starts; a node also takes the edges that others want, so that theta is then sought by bisection.

    Raises:
        ValueError: `neighbours` is not a number from 1 to K - 1.
    """
    nodes = D.shape[-1]
    if not 1 <= neighbours < nodes:
        raise ValueError(f"neighbours is {neighbours!r}; it must be from 1 to {nodes - 1}, one less than the clients")
    scales = []
    for distances in host(D):
        z = np.sort(distances[~np.eye(nodes, dtype=bool)].reshape(nodes, -1), 1)
        if not z.max() > 0:  # all nodes are equal, and no scale tells them apart
            scales.append(1.0)
            continue
        k = min(neighbours, nodes - 2)
        spread = (np.arange(1, nodes) * z - z.cumsum(1)) * z
        bounds = np.sqrt(2 / np.maximum(spread[:, k - 1 : k + 1], 1e-30 * max(z.max(), 1e-300) ** 2)).mean(0)
        theta, low, high = float(np.sqrt(bounds.prod())), 0.0, math.inf
        for _ in range(60):
            W = prox(-theta * distances[None], 1.0, 0.0, 1.0).W
            count = float((W > 0).sum() / nodes)
            if abs(count - neighbours) < 0.5:
                break
            low, high = (theta, high) if count > neighbours else (low, theta)
            theta = math.sqrt(low * high) if low > 0 and high < math.inf else theta * (2 if high == math.inf else 0.5)
        scales.append(theta)
    return like(scales, D)[:, None, None]


def _typical(cost: Array) -> Array:
    """Return the median cost of an edge, (N, 1, 1)."""
    nodes, xp = cost.shape[-1], of(cost)
    ordered = xp.sort(set_diagonal(cost * 1, -math.inf).reshape(len(cost), -1), -1)
    ordered = (ordered if xp is not torch else ordered.values)[:, nodes:]
    edges = ordered.shape[-1]
    return ((ordered[:, (edges - 1) // 2] + ordered[:, edges // 2]) / 2)[:, None, None]


def _failure(cost: Array, W: Array, beta: float) -> float:
    """Return how far the optimality conditions fail at the worst edge, relative to the size of their terms."""
    inverse = beta / W.sum(-1)
    gain = inverse[:, :, None] + inverse[:, None, :]
    gradient = set_diagonal((cost - gain) / (cost + gain), 0.0)
    return float(of(W).where(W > 0, abs(gradient), -gradient).max())


def learn(cost: Array, beta: float, start: Array | None = None, *, careful: bool = False) -> Prox:
    r"""Return the minimisers of :math:`\langle w, c \rangle - \beta \sum \log \deg` for a batch.

    Proximal-point iteration: each round is one exact prox around the last graph, ``rho (w+ - w)`` is what is left of
    the gradient, and rho falls tenfold a round, which makes convergence superlinear.

    Args:
        cost: c, (N, K, K) symmetric, positive off the diagonal.
        beta: weight of the log barrier.
        start: (N, K, K) graph to start from, such as the solution for neighbouring costs; None: no edges.
        careful: look even at an accelerator's numbers, so that the result is the solution.
    """
    xp, unseen = of(cost), blind(cost) and not careful
    # In units where the typical edge costs one and beta is one, the same schedule fits every instance.
    unit = _typical(cost)
    cost = set_diagonal(xp.minimum(cost / unit, _DEAREST + 0 * unit), 0.0)
    w = 0 * cost if start is None else start * (unit / beta)
    if unseen:
        # So few and so mild rounds that no prox needs care, or that the graph is reported as not solved.
        floor = 0.003
    else:
        # Weights reach the inverse of the cheapest cost, so that is how weak the pull to the last graph has to get; but
        # not so weak that the best edge of a node falls behind what the prox can tell apart, 1e10 in its units.
        best = host(xp.amin(set_diagonal(cost * 1, math.inf), -1))
        floor = max(1e-8 * min(1.0, float(best.min())) ** 2, 1e-18 * float(best.max()) ** 2)
    rho, dual, steps, solved = 1.0, None, 0, True
    for _ in range(_BLIND_ROUNDS if unseen else _MAX_ROUNDS):
        found = prox(w - cost / rho, 1.0, 0.0, rho, dual, careful=careful)
        dual, steps, solved = found.dual, steps + found.steps, solved & found.solved
        # What is left of the gradient at an edge, beside the terms it is the difference of.
        terms = cost + dual[:, :, None] + dual[:, None, :]
        left = xp.amax((rho * abs(found.W - w) / terms), (-1, -2))
        w = found.W
        if not unseen and left.max() <= _PRECISION:
            break
        rho = max(rho / 10, floor)
    return Prox(w * (beta / unit), dual, solved & (left <= _SEEN_LATER) if unseen else True, steps)

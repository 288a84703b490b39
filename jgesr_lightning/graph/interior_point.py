r"""The minimiser of the log-degree model, with or without a quadratic term, however far apart the costs lie.

.. math:: \min_{w \ge 0}\ \langle w, c \rangle + \tfrac\kappa2 \|w\|^2 - \sum_k \log \deg_k(w)

With :math:`\kappa = 0` this is graph learning, and not unique where costs are tied; with :math:`\kappa > 0` it is
the prox at :math:`-c / \kappa`, with :math:`\kappa` next to nothing beside costs that lie far above others.
Proximal-point rounds make either tame, and find a minimiser that rounding of the costs does not choose: each round adds
:math:`\frac\epsilon2 \sum_e \max(0, c_e)^2 (w_e - p_e)^2`, p the result of the last one, which in units of each edge is
the same small pull, and is gone where w stands still. With :math:`\lambda` the dual variables of the degrees, one a
node, and :math:`\kappa_e = \kappa + \epsilon \max(0, c_e)^2`, the solution of a round is where

.. math:: \lambda = 1 / \deg(w), \qquad w_e s_e = 0,
          \qquad s = c + \kappa w + \epsilon \max(0, c)^2 (w - p) - B \lambda \ge 0,

:math:`(B \lambda)_{mn} = \lambda_m + \lambda_n`, :math:`B^\top w = \deg(w)`. An interior-point method goes there:
Newton steps towards products :math:`w_e s_e` that are all alike and shrink, predictor and corrector as in Mehrotra, "On
the implementation of a primal-dual interior point method", SIAM J. Optim. 2 (1992). For aims t of the products a step
is a system in K unknowns,

.. math:: \Bigl(\mathrm{diag}(\lambda \deg) + \Lambda B^\top \mathrm{diag}(q) B \Lambda\Bigr)
          \frac{\Delta\lambda}{\lambda} = 1 - \lambda \deg(w + a), \qquad \Delta w = a + q B \Delta\lambda,
          \qquad q = \frac{w}{s + \kappa_e w}, \quad a = \frac{t - w s}{s + \kappa_e w},

whose entries the pull bounds by :math:`1/\epsilon`. Unknowns are never formed anew from their conditions, so that what
becomes small keeps its digits. In numpy, on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jgesr_lightning.graph.arrays import solver

Numbers = npt.NDArray[np.float64]

_ROUNDS, _STEPS = 40, 100  # three to fifteen rounds are usual, of six to thirty steps each
_PULL, _WEAKER, _WEAKEST = 1e-4, 0.03, 1e-10  # epsilon; its factor where a round moved w over half as far as the last
_PULL_BESIDE_RIDGE = 1e-6  # there to keep the system tame: ties are settled by the ridge
_MOST = 1e140  # times the typical cost: what is dearer counts as this, whose square is a number
_LEFT = 1e-12  # of the pull, beside the cost
_PRODUCTS, _DEGREES = 1e-22, 1e-13  # <w, s>, beside <w, c> = K, and 1 - lam deg at the end of a round
_STAY = 0.99  # at most that part of the way to where a variable were zero


def minimise_each(costs: Numbers, ridge: float = 0.0) -> tuple[Numbers, int]:
    """Return (W, Newton steps of all) for costs (..., K, K) symmetric, whose diagonals are not read."""
    found = [minimise(cost, ridge) for cost in costs.reshape(-1, *costs.shape[-2:])]
    return np.stack([W for W, _ in found]).reshape(costs.shape), sum(steps for _, steps in found)


def minimise(cost: Numbers, ridge: float = 0.0) -> tuple[Numbers, int]:
    """Return (W, Newton steps) for one matrix of costs, (K, K) symmetric; without a ridge all have to be positive."""
    edges = _Edges(len(cost))
    c = cost[edges.m, edges.n]
    unit = max(float(np.median(c)), ridge**0.5)  # of an edge's cost, so that its weight is about one
    c, ridge = np.minimum(c / unit, _MOST), ridge / unit / unit
    w, steps, pull, before = np.zeros_like(c), 0, _PULL_BESIDE_RIDGE if ridge else _PULL, np.inf
    for _ in range(_ROUNDS):
        new, taken = _round(edges, c, ridge, pull, w)
        moved = float((np.maximum(c, 0) * abs(new - w)).max())
        w, steps = new, steps + taken
        if not pull * moved > _LEFT:
            break
        if moved > before / 2:
            pull = max(_WEAKER * pull, _WEAKEST)
        before = moved
    W = np.zeros_like(cost)
    W[edges.m, edges.n] = W[edges.n, edges.m] = w / unit
    return W, steps


class _Edges:
    """All pairs m < n of K nodes, and the sums over them."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.m, self.n = np.triu_indices(nodes, 1)

    def ends(self, numbers: Numbers) -> Numbers:
        """Return ``B x``: the sum of both ends of each edge."""
        return numbers[self.m] + numbers[self.n]

    def degrees(self, weights: Numbers) -> Numbers:
        """Return ``B^T w``: the sum over the edges of each node."""
        sums = np.zeros(self.nodes)
        for ends in (self.m, self.n):
            sums += np.bincount(ends, weights, self.nodes)
        return sums

    def matrix(self, weights: Numbers, scale: Numbers) -> Numbers:
        """Return ``diag(scale) B^T diag(weights) B diag(scale)``, (K, K)."""
        product = np.diag(self.degrees(weights))
        product[self.m, self.n] = product[self.n, self.m] = weights
        return scale[:, None] * product * scale


def _round(edges: _Edges, c: Numbers, ridge: float, pull: float, towards: Numbers) -> tuple[Numbers, int]:
    """Return (w, Newton steps) of a round; see above, where `ridge` is kappa, `pull` epsilon and `towards` p."""
    cheapest, pulls, size = np.full(edges.nodes, np.inf), pull * np.maximum(c, 0) ** 2, edges.nodes
    np.minimum.at(cheapest, edges.m, c)
    np.minimum.at(cheapest, edges.n, c)
    lam = 0.45 * np.maximum(cheapest, (ridge / size) ** 0.5)
    used = edges.ends(lam)
    short = np.maximum(1.1 * used - c, 0)  # where costs are too low, or negative, for slack: the ridge makes up for it
    w = 0.5 / (size - 1) / (c + short - used)
    if ridge:
        w = np.maximum(w, short / ridge)
    # Of an edge that a ridge holds back, not its cost, this is the difference of large numbers.
    s = np.maximum(c + ridge * w - used + pulls * (w - towards), np.where(short > 0, 0.1 * used, 0))
    unmet = np.inf
    for step in range(_STEPS):  # noqa: B007
        total, shares, last = float(w @ s), lam * edges.degrees(w), unmet
        unmet = float(abs(1 - shares).max())
        # The end: products are nothing, and degrees right or kept by rounding from coming nearer; or nothing is finite.
        if not total > _PRODUCTS * size and not _DEGREES < unmet < 0.3 * last:
            break
        towards_products = _newton(edges, w, s, lam, shares, ridge + pulls)
        d_w, d_s, d_lam = towards_products(0.0)
        length = min(1.0, _to_zero((w, d_w), (s, d_s), (lam, d_lam)))
        centring = ((w + length * d_w) @ (s + length * d_s) / total) ** 3
        d_w, d_s, d_lam = towards_products(centring * total / len(s) - d_w * d_s)
        length = min(1.0, max(_STAY, 1 - total**0.5) * _to_zero((w, d_w), (s, d_s), (lam, d_lam)))
        w, s, lam = w + length * d_w, s + length * d_s, lam + length * d_lam
    # Of each product one factor is nothing: which one is seen beside the terms that it is the difference of.
    terms = edges.ends(lam) + np.maximum(-c, 0)
    return np.where(w * terms <= s / (s + terms), 0, w), step + 1


def _newton(
    edges: _Edges, w: Numbers, s: Numbers, lam: Numbers, shares: Numbers, curvature: Numbers
) -> Callable[[Numbers | float], tuple[Numbers, Numbers, Numbers]]:
    """Return the function whose values for aims of the products are the changes of w, s and lam."""
    products, slack = w * s, s + curvature * w
    q = w / slack
    solve = solver(edges.matrix(q, lam) + np.diag(shares))

    def towards(aims: Numbers | float) -> tuple[Numbers, Numbers, Numbers]:
        ahead = (aims - products) / slack
        d_lam = lam * solve(1 - shares - lam * edges.degrees(ahead))[:, 0]
        d_w = ahead + q * edges.ends(d_lam)
        return d_w, curvature * d_w - edges.ends(d_lam), d_lam

    return towards


def _to_zero(*values_and_changes: tuple[Numbers, Numbers]) -> float:
    """Return how many times the changes can be added before one of the values is zero."""
    fastest = [float((-change / value).max()) for value, change in values_and_changes]
    return 1 / max(1e-300, *fastest)

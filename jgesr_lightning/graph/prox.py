r"""The exact prox of the log-degree penalty, through its dual in K unknowns: derivation, and plain Newton iteration.

.. math:: \mathrm{prox}_{g/\rho}(\theta) = \arg\min_{w \ge 0} -\beta \sum_k \log \deg_k(w) + \gamma 1^\top w
          + \tfrac{\rho}{2} \|w - \theta\|^2 \qquad (w, \theta: \text{edges})

Write :math:`s = \sqrt{\beta/\rho}`, :math:`w = s v`, :math:`t = (\theta - \gamma/\rho) / s`. Every instance is then the
one without parameters, :math:`\min_{v \ge 0} -\sum \log \deg(v) + \frac12 \|v - t\|^2`. With one dual variable a node,

.. math:: v_{mn} = \max(0, t_{mn} + y_m + y_n), \qquad \max_{y > 0} \sum_k \log y_k - \tfrac12 \sum_e v_e^2,

whose gradient is :math:`1/y - \deg(v)` and whose negative (generalised) Hessian is
:math:`\mathrm{diag}(1/y^2 + A 1) + A` with A the adjacency of the edges where v > 0. The logarithm is self-concordant,
so that Newton steps, cut where their decrement is large, keep y positive. The dual variables of the problem as given
are :math:`\lambda = \sqrt{\beta\rho}\, y = \beta / \deg(w)`.

From the solution of a neighbouring problem, three steps reach rounding. Problems of which the plain iteration does not
get there, or whose y are so large that v = t + y + y loses its digits, are left to `graph.prox_extremes`. Where the
numbers lie on an accelerator a fixed number of steps is taken, and what they did not solve is reported, not looked at.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, blind, enter, host, leave, like, of, positive_part, set_diagonal, solve
from jgesr_lightning.graph.laplacian import symmetric_part
from jgesr_lightning.graph.prox_extremes import solve_with_care

QUIET = functools.partial(np.errstate, all="ignore")
_BLIND_STEPS, _STEPS = 7, 14  # from a neighbour's solution three are enough nearly always
_LARGEST, _SPREAD = 8.0, 1e3  # of y, that leave v its digits
_LARGEST_BLIND = 64.0  # the same, of all but three or four of them


class Prox(NamedTuple):
    """N solved problems.

    Attributes:
        W: (N, K, K) the minimisers.
        dual: (N, K) lam.
        solved: True; of an accelerator's numbers (N,) bool, False where they need care.
        steps: Newton steps taken.
    """

    W: Array
    dual: Array
    solved: Array | bool
    steps: int


def prox_log_degree(theta: Tensor, beta: float, gamma: float, rho: float) -> Tensor:
    r"""Return :math:`\arg\min_{w \ge 0} -\beta \sum_k \log \deg_k + \gamma 1^\top w + \frac\rho2 \|w - \theta\|^2`.

    Sums over w run over edges (each pair of nodes once). Exact to rounding; every degree of the result is positive.

    Args:
        theta: (..., K, K) symmetric, finite; its diagonal is not read. (The prox of a matrix that is not symmetric,
            over symmetric matrices, is that of its symmetric part, which is what is returned.)
        beta: weight of the log barrier, positive.
        gamma: weight of the sum of the edges, non-negative.
        rho: inverse step, positive.

    Returns:
        W (..., K, K) float64 on the device of `theta`, symmetric, non-negative, zero diagonal.

    Raises:
        ValueError: a value out of range, K < 2, or a `theta` that is not finite.
    """
    if not (beta > 0 and rho > 0 and gamma >= 0 and math.isfinite(beta + gamma + rho)):
        raise ValueError(f"beta and rho must be positive, gamma non-negative; got {beta}, {rho}, {gamma}")
    with QUIET():
        found = prox(enter(symmetric_part("theta", theta)), beta, gamma, rho, careful=True)
    return leave(found.W).reshape(theta.shape)


def prox(
    theta: Array,
    beta: float,
    gamma: float,
    rho: float | Array,
    dual: Array | None = None,
    *,
    careful: bool = False,
) -> Prox:
    """Solve a batch; see `prox_log_degree`. To be called inside `QUIET`: what is not finite is not solved.

    Args:
        theta: (N, K, K) symmetric, finite.
        beta: weight of the log barrier.
        gamma: weight of the sum of the edges.
        rho: inverse step, a number or (N, 1, 1).
        dual: (N, K) positive start, such as the lam of a neighbouring problem; changes the steps, not the result.
        careful: look even at an accelerator's numbers, so that the result is the solution.
    """
    root = (beta * rho) ** 0.5
    t = theta * (root / beta)
    if gamma:
        t -= gamma / root
    of_nodes = root if isinstance(root, float) else root[..., 0]
    y = None if dual is None else dual / of_nodes
    v, found, solved, steps = _newton(t, y)
    if (careful or not blind(t)) and not (solved if isinstance(solved, bool) else solved.all()):
        v, found, more = solve_with_care(host(t), None if y is None else host(y), first_guess)
        v, found, steps, solved = like(v, t), like(found, t), steps + more, True
    return Prox(v * (beta / root), found * of_nodes, solved, steps)


def _newton(t: Array, y: Array | None) -> tuple[Array, Array, Array | bool, int]:
    """Return (v, y, solved, steps) of unit problems, from y; the diagonal of t becomes -inf."""
    unseen, xp = blind(t), of(t)
    close = 1e-14 + 2e-16 * t.shape[-1] / 8
    if y is None:
        y = first_guess(t)
    set_diagonal(t, -math.inf)  # so that max(0, .) leaves the diagonal of v at zero
    for steps in range(1 + (_BLIND_STEPS if unseen else _STEPS)):
        v = positive_part(t + (y[:, :, None] + y[:, None, :]))
        residual = 1 - y * v.sum(-1)  # the gradient, times y
        far = True if unseen else (worst := abs(residual).max()) > 0.3
        if steps == _BLIND_STEPS if unseen else not close < worst < math.inf:
            break
        hessian, inverse = xp.sign(v), 1 / y
        set_diagonal(hessian, hessian.sum(-1) + inverse * inverse)
        gradient = residual * inverse
        step = solve(hessian, gradient[..., None])[..., 0]
        if far:
            decrement = (gradient * step).sum(-1)[:, None] ** 0.5
            step = step / (1 + positive_part(1.1 * decrement - 1))
        y = y + step
    if not unseen:
        return v, y, bool(worst <= close and 0 < (largest := y.max()) < min(_LARGEST, _SPREAD * y.min())), steps
    largest, smallest = xp.amax(y, -1), xp.amin(y, -1)
    tame = (largest < _LARGEST_BLIND) & (largest < _SPREAD * smallest) & (smallest > 0)
    return v, y, tame & (xp.amax(abs(residual), -1) <= close), steps


def first_guess(t: Array) -> Array:
    """Return (N, K) dual variables near the solution of unit problems, most of the active edges right.

    A node for which all y are one number solves ``y (b + 2 n y) = 1``, n edges being active and b the sum of their t.
    The first guess takes all edges of all nodes, and of their t what is positive; a sweep takes the edges that are
    active at the last guess, and moves the neighbours half as much as the node. Two sweeps save more Newton steps.
    """
    xp, nodes = of(t), t.shape[-1]
    t = set_diagonal(t * 1, -math.inf)
    b = positive_part(t * 1).sum((-1, -2)) / nodes
    y = _positive_root(b, 2.0 * (nodes - 1))[:, None] + 0.5 * positive_part(-xp.amax(t, -1))
    for _ in range(2):
        v = positive_part(t + (y[:, :, None] + y[:, None, :]))
        slope = 1 + positive_part(1.5 * xp.sign(v).sum(-1) - 1)
        swept = _positive_root(v.sum(-1) - slope * y, slope)
        y = xp.where(y > 10, y, swept)  # there the differences would lose their digits
    return y


def _positive_root(b: Array, a: Array | float) -> Array:
    """Return the positive y with ``y (b + a y) = 1``."""
    return 2 / (b + (b * b + 4 * a) ** 0.5)

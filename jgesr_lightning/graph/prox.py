r"""The exact prox of the log-degree penalty, through its dual in K unknowns: derivation, and plain Newton iteration.

.. math:: \mathrm{prox}_{g/\rho}(\theta) = \arg\min_{w \ge 0} -\beta \sum_k \log \deg_k(w) + \gamma 1^\top w
          + \tfrac{\rho}{2} \|w - \theta\|^2 \qquad (w, \theta: \text{edges})

Write :math:`s = \sqrt{\beta/\rho}`, :math:`w = s v`, :math:`t = (\theta - \gamma/\rho) / s`. Every instance is then the
one without parameters, :math:`\min_{v \ge 0} -\sum \log \deg(v) + \frac12 \|v - t\|^2`. With one dual variable a node,

.. math:: v_{mn} = \max(0, t_{mn} + y_m + y_n), \qquad \max_{y > 0} \sum_k \log y_k - \tfrac12 \sum_e v_e^2,

whose gradient is :math:`r = 1/y - \deg(v)` and whose negative (generalised) Hessian is
:math:`H = \mathrm{diag}(1/y^2 + A 1) + A` with A the adjacency of the edges where v > 0. The logarithm is
self-concordant, so that Newton steps, cut where their decrement is large, keep y positive. While A stays what it is,
:math:`\deg` is linear in y, and the step p to the solution solves :math:`H p = r + p^2 / (y^2 (y + p))`: close to the
solution a few more systems with the same H replace Newton's next steps. The dual variables of the problem as
given are :math:`\lambda = \sqrt{\beta\rho}\, y = \beta / \deg(w)`.

Where y is large, v = t + y + y loses digits, and the residual with them. The last steps then correct v itself, by p + p
on its edges: what comes out solves a problem whose t differs by rounding. What is not solved so, or has y far apart, is
left to `graph.interior_point`. Where the numbers lie on an accelerator a fixed number of steps is taken, and what they
did not solve is reported, not looked at.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, blind, enter, host, leave, like, of, positive_part, set_diagonal, solver
from jgesr_lightning.graph.interior_point import minimise_each
from jgesr_lightning.graph.laplacian import symmetric_part

QUIET = functools.partial(np.errstate, all="ignore")
_BLIND_STEPS, _STEPS = 7, 14  # from a neighbour's solution one or two are enough nearly always
_CLOSE = 0.3  # residual from which a step is corrected
_NEAR, _ROUNDING = 1e-6, 1e-15  # residuals that are corrected in v itself; what t + y + y rounds, beside y^2
_CORRECTIONS = 2
_LARGEST, _SPREAD = 1e3, 1e3  # of y; beyond, it is the interior point that is sure of the digits
_LARGEST_BLIND = 64.0  # the same, of all but three or four of them


class Prox(NamedTuple):
    """Solved problems.

    Attributes:
        W: (..., K, K) the minimisers.
        dual: (..., K) lam.
        solved: True; of an accelerator's numbers (...,) bool, False where they need care.
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
        return leave(prox(enter(symmetric_part("theta", theta)), beta, gamma, rho, careful=True).W)


def prox(
    theta: Array, beta: float, gamma: float, rho: float | Array, dual: Array | None = None, *, careful: bool = False
) -> Prox:
    """Solve a batch; see `prox_log_degree`. To be called inside `QUIET`: what is not finite is not solved.

    `theta` is (..., K, K) symmetric, `rho` a number or (..., 1, 1), `dual` (..., K) a positive start, such as the lam
    of a neighbouring problem, which changes the steps and not the result. `careful` looks even at an accelerator's
    numbers, and solves on the host what is not solved there.
    """
    root = (beta * rho) ** 0.5
    t = theta * (root / beta)
    if gamma:
        t = t - gamma / root
    t = set_diagonal(t, -math.inf)  # so that max(0, .) leaves the diagonal of v at zero
    start = first_guess(t) if dual is None else dual[..., None] / root
    v, y, solved, steps = _newton(t, start)
    if solved is False:
        v, more = minimise_each(-t, 1.0)
        y, solved, steps = 1 / v.sum(-1, keepdims=True), True, steps + more
    found = Prox(v * (beta / root), (y * root)[..., 0], solved, steps)
    if careful and not isinstance(solved, bool) and not bool(solved.all()):
        there = prox(*map(host, (theta, beta, gamma, rho, dual)))
        found = Prox(like(there.W, v), like(there.dual, v), solved | True, there.steps)
    return found


def _newton(t: Array, y: Array) -> tuple[Array, Array, Array | bool, int]:
    """Return (v, y, solved, steps) of unit problems, from y (..., K, 1); t has a diagonal of -inf."""
    unseen, close = blind(t), 1e-14 + 2e-16 * t.shape[-1] / 8
    limit = _BLIND_STEPS if unseen else _STEPS
    for steps in range(limit + 1):
        v = positive_part(t + (y + y.swapaxes(-1, -2)))
        residual = 1 - y * v.sum(-1, keepdims=True)  # the gradient, times y
        worst = 1.0 if unseen else abs(residual).max()
        if steps == limit or not close < worst < math.inf or (worst < _NEAR and worst < _ROUNDING * y.max() ** 2):
            break
        newton, gradient, curvature = _system(v, y), residual / y, 1 / (y * y)
        step = newton(gradient)
        if worst > _CLOSE:
            decrement = (gradient * step).sum(-2, keepdims=True) ** 0.5
            step = step / (1 + positive_part(1.1 * decrement - 1))
        else:
            for _ in range(3):
                step = newton(gradient + curvature * step * step / (y + step))
        y = y + step
    if not unseen:
        for _ in range(_CORRECTIONS if close < worst < _NEAR else 0):
            step = _system(v, y)(residual / y)
            v, y = positive_part(of(v).sign(v) * (v + (step + step.swapaxes(-1, -2)))), y + step
            residual = 1 - y * v.sum(-1, keepdims=True)
            worst, steps = abs(residual).max(), steps + 1
        return v, y, bool(worst <= close and 0 < y.max() < min(_LARGEST, _SPREAD * y.min())), steps
    largest = of(y).amax(y, -2, keepdims=True)
    within = (y > 0) & (y < _LARGEST_BLIND) & (y * _SPREAD > largest) & (abs(residual) <= close)
    return v, y, within.all(-2)[..., 0], steps


def _system(v: Array, y: Array) -> Callable[[Array], Array]:
    """Return the function that solves ``H p = r`` for p, both (..., K, 1)."""
    hessian = of(v).sign(v)
    return solver(set_diagonal(hessian, hessian.sum(-1) + (1 / (y * y))[..., 0]))


def first_guess(t: Array) -> Array:
    """Return (..., K, 1) dual variables near the solution of unit problems, most of the active edges right.

    Were all y one number, it would solve ``y (b + 2 n y) = 1``, n edges of a node being active and b the sum of their
    t. The first guess takes half of all edges, and the t that are positive; a sweep takes the edges that are active at
    the last guess, of which a node may have none. Two sweeps take less time than the Newton steps that they save.
    """
    cheapest = positive_part(-of(t).amax(t, -1))[..., None]
    y = _positive_root(positive_part(t).sum(-1)[..., None], t.shape[-1] - 1.0) + 0.5 * cheapest
    for _ in range(2):
        v = positive_part(t + (y + y.swapaxes(-1, -2)))
        slope = 1 + 2 * of(v).sign(v).sum(-1)[..., None]
        swept = _positive_root(v.sum(-1)[..., None] - slope * y, slope)
        y = of(y).where(y > 10, y, swept)  # there the differences would lose their digits
    return y


def _positive_root(b: Array, a: Array | float) -> Array:
    """Return the positive y with ``y (b + a y) = 1``."""
    return 2 / (b + (b * b + 4 * a) ** 0.5)

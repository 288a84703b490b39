r"""Where the prox is not tame: edges so dear or so alike that the plain Newton iteration loses digits or its way.

Unit problems as in `graph.prox`, ``min_{v >= 0} -sum log deg(v) + 1/2 ||v - t||^2``, t with -inf on its diagonal, in
numpy on the host: they are rare. What is done for them beyond the plain iteration, each for a case in the tests that
failed without it:

- t beyond 1e6 is scaled into the range of double precision (`_tame`);
- a start far from the solution is led there by proximal-point rounds (`_solve_unit`);
- the unknown is the difference from the start, added as if exactly (`_shifted`), so that it is as exact as it is small;
- steps pass a line search on the dual, and beyond y = 1e5 their matrix is not formed (`_direction_by_qr`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jgesr_lightning.graph.arrays import Array, set_diagonal, solve

_EPS = float(np.finfo(np.float64).eps)
_MAX_STEPS = 200
_STIFF = 10.0  # largest y from which a start out of balance is led to the solution
_CHEAP, _DEAREST = 1e6, 1e10


def solve_with_care(t: Array, y: Array | None, first_guess: Callable[[Array], Array]) -> tuple[Array, Array, int]:
    """Return (v, y, Newton steps) of unit problems of any size, from y, if that is near, or from `first_guess`."""
    t = t.copy()
    shrink = _tame(t) if float(t.min(where=np.isfinite(t), initial=0)) < -_CHEAP else None
    if y is not None:
        y = y if shrink is None else y * shrink[:, 0]
        if not _unbalance(t, y) <= 0.9:  # of a problem that is no neighbour
            y = None
    v, y, steps = _solve_unit(t, first_guess(t) if y is None else y)
    return (v, y, steps) if shrink is None else (v * shrink, y / shrink[:, 0], steps)


def _tame(t: Array) -> Array | None:
    """Bring a unit problem into the range that double precision can solve, in place; return (B, 1, 1) or None.

    v is the small difference t + y_m + y_n, so that |t| beyond 1e16 leaves no digit of it. Where even the cheapest edge
    has t < -1e6, v is below 1e-6, the quadratic term is 1e-12 of the others, and without it v(t) = a v(a t): t is
    multiplied by the returned factors a, and so is to be v. Beyond that, an edge with t < -1e10 counts as having that:
    a node without a better one gets a degree of 1e-10 and not one still smaller.
    """
    cheapest = -t.max((-1, -2))
    shrink: Array | None = None
    if float(cheapest.max()) > _CHEAP:
        shrink = np.where(cheapest > _CHEAP, _CHEAP / np.maximum(cheapest, 1), 1.0)[:, None, None]
        t *= shrink
    np.maximum(t, -_DEAREST, out=t, where=np.isfinite(t))
    return shrink


def _shifted(t: Array, c: Array) -> Array:
    """Return ``t_mn + c_m + c_n`` as if added exactly and rounded once.

    Where edges are expensive, t is large and negative, v = t + y_m + y_n is tiny, and plain sums would lose its digits.
    """
    left, right = c[:, :, None], c[:, None, :]
    pair = left + right
    back = pair - left
    low = (left - (pair - back)) + (right - back)
    finite = np.where(np.isinf(t), 0, t)
    total = finite + pair
    back = total - finite
    low += (finite - (total - back)) + (pair - back)
    total += low
    return np.where(np.isinf(t), t, total)


def _solve_unit(t: Array, y: Array) -> tuple[Array, Array, int]:
    """Return (v, y, Newton steps) of the unit problem, from y.

    Where edges are expensive, |t| large, the dual is stiff: v is a small difference of large y, and Newton's steps from
    afar are short. Such a start is led there by proximal-point rounds, ``+ kappa/2 ||v - last v||^2``: the first kappa
    makes the problem one with |t| about one, and each later one is a hundredth.
    """
    steps = 0
    largest = float(y.max())
    kappa = 0.0
    if largest > _STIFF:
        kappa = largest**2 if _unbalance(t, y) > 0.5 else 0.0
    v = np.zeros_like(t)
    while kappa > 1:
        scale = math.sqrt(1 + kappa)
        _, v, y, taken = _newton((t + kappa * v) / scale, y / scale, loose=True)
        v, y, steps, kappa = v / scale, y * scale, steps + taken, kappa / 100
    # The unknown is the difference from where Newton starts, so that what it adds is as exact as it is small; where it
    # turns out not to be small, another pass starts from where the last one ended.
    for _ in range(4):
        delta, v, y, taken = _newton(t, y)
        steps += taken
        if float((np.abs(delta) * y).max()) <= 256:  # rounding of v, relative to 1/y, below 1e-13
            break
    return v, y, steps


def _unbalance(t: Array, y: Array) -> float:
    """Return the largest ``|1 - y deg|``, zero at the solution."""
    return float(np.abs(1 - y * np.maximum(t + y[:, :, None] + y[:, None, :], 0).sum(-1)).max())


def _newton(t: Array, c: Array, *, loose: bool = False) -> tuple[Array, Array, Array, int]:
    """Return (y - c, v, y, steps) of the unit problem, from y = c."""
    base = _shifted(t, c) if float(c.max()) > 8 else t + (c[:, :, None] + c[:, None, :])
    none = np.zeros_like(c)
    state = _move(base, none, c, none)
    tolerance = 0.1 if loose else 1e-14 + _EPS * base.shape[-1] / 8
    best, stalled = math.inf, 0
    for steps in range(_MAX_STEPS):
        delta, y, v, residual, worst = state
        if worst <= tolerance:
            return delta, v, y, steps
        if worst < 1e-3:  # close; rounding may keep the residual from getting closer
            rounding = _EPS * float((np.abs(delta) * y).max())
            stalled = stalled + 1 if best / 2 < worst < 1e4 * (_EPS + rounding) else 0
            best = min(best, worst)
            if stalled >= 20 or worst <= 4 * rounding:
                return delta, v, y, steps
        u = _newton_direction(v, y, residual)
        size = np.minimum(1, 0.9 / np.maximum(-u.min(-1), 0.9))[:, None]
        following = _move(base, delta, y, size * u)
        state = following if following.worst <= worst / 4 else _line_search(base, state, u, size, following)
    return state.delta, state.v, state.y, _MAX_STEPS


class _State(NamedTuple):
    delta: Array
    y: Array
    v: Array
    residual: Array
    worst: float


def _move(base: Array, delta: Array, y: Array, step: Array) -> _State:
    delta = delta + step * y
    y = y + step * y
    v = delta[:, :, None] + delta[:, None, :]  # first, so that v is exactly symmetric
    v += base
    np.maximum(v, 0, out=v)
    residual = 1 - y * v.sum(-1)
    return _State(delta, y, v, residual, float(np.abs(residual).max()))


def _line_search(base: Array, last: _State, u: Array, size: Array, state: _State) -> _State:
    """Return the state after the longest of the steps size, size/2, ... that the dual does not object to.

    A step is taken where the slope along it has not turned round by more than 0.8 of what it was and the dual has not
    fallen (Hager and Zhang's form of Armijo's rule, which still tells up from down when the dual's change is rounding).
    `state` is the one after the whole step, which is only questioned because its residual did not shrink fourfold.
    """
    delta, y, v, residual, _ = last
    done = np.abs(residual).max(-1) < 1e-10
    slope = (residual * u).sum(-1)
    noise = 1e-14 * (np.abs(np.log(y)).sum(-1) + (v * v).sum((-1, -2)) + base.shape[-1])
    for _ in range(60):
        step = size * u
        new_slope = (state.residual * u / (1 + step)).sum(-1)
        rise = np.log1p(step).sum(-1) - ((state.v - v) * (state.v + v)).sum((-1, -2)) / 4
        good = (new_slope >= 0) | ((new_slope >= -0.8 * slope) & (rise >= -noise)) | done
        if good.all():
            break
        size = np.where(good[:, None], size, size / 2)
        state = _move(base, delta, y, size * u)
    return state


def _newton_direction(v: Array, y: Array, residual: Array) -> Array:
    """Return u, the Newton step in units of y: ``(I + diag(y) (diag(A1) + A) diag(y)) u = residual``.

    The eigenvalues of the matrix are at least one. On a bipartite component one of them is exactly one, however large
    y: from a ratio of 1e10 on, rounding of the others would drown it, so that the matrix is not formed any more and its
    factor ``[I; E]`` (one row y_m e_m + y_n e_n an active edge) is reduced instead.
    """
    if float(y.max()) > 1e5:
        return np.stack([_direction_by_qr(*item) for item in zip(v > 0, y, residual, strict=True)])
    adjacency = np.sign(v)
    hessian = y[:, :, None] * y[:, None, :] * adjacency
    set_diagonal(hessian, adjacency.sum(-1) * (y * y) + 1)
    return solve(hessian, residual[..., None])[..., 0]


def _direction_by_qr(active: Array, y: Array, residual: Array) -> Array:
    size = len(y)
    rows, columns = np.nonzero(np.triu(active))
    factor = np.zeros((len(rows) + size, size))
    factor[np.arange(len(rows)), rows] = y[rows]
    factor[np.arange(len(rows)), columns] = y[columns]
    factor[len(rows) :] = np.eye(size)
    orthogonal, triangle = np.linalg.qr(factor)
    # The least-squares solution of [E; I] u = [0; residual] has the normal equations above.
    return np.linalg.solve(triangle, orthogonal[len(rows) :].T @ residual)

r"""Where the prox is not tame: edges so dear or so alike that the plain Newton iteration loses digits or its way.

Unit problems as in `graph.prox`, ``min_{v >= 0} -sum log deg(v) + 1/2 ||v - t||^2``, t with -inf on its diagonal, in
numpy on the host: they are rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jgesr_lightning.graph.arrays import Array, set_diagonal, solver

_EPS = float(np.finfo(np.float64).eps)
_MAX_STEPS = 200
_STIFF = 10.0  # largest y from which a start out of balance is led to the solution
_CHEAP, _DEAREST = 1e6, 1e10


def solve_with_care(t: Array, first_guess: Callable[[Array], Array]) -> tuple[Array, Array, int]:
    """Return (v, y, Newton steps) of unit problems of any size.

    v is the small difference t + y_m + y_n, so that |t| beyond 1e16 leaves no digit of it. Where even the cheapest edge
    has t < -1e6, v is below 1e-6, the quadratic term is 1e-12 of the others, and without it v(t) = a v(a t): such t are
    scaled. Beyond that, an edge with t < -1e10 counts as having that.

    Where |t| is large the dual is stiff: Newton's steps from afar are short. Such a start is led to the solution by
    proximal-point rounds, ``+ kappa/2 ||v - last v||^2``: the first kappa makes the problem one with |t| about one, and
    each later one is a hundredth.
    """
    shape, t = t.shape, t.reshape(-1, *t.shape[-2:])
    shrink = _CHEAP / np.maximum(-t.max((-1, -2), keepdims=True), _CHEAP)
    t = np.where(np.isinf(t), t, np.maximum(t * shrink, -_DEAREST))
    y, steps, v = first_guess(t), 0, np.zeros_like(t)
    kappa = float(y.max()) ** 2 if y.max() > _STIFF else 0.0
    while kappa > 1:
        scale = math.sqrt(1 + kappa)
        _, v, y, taken = _newton((t + kappa * v) / scale, y / scale, loose=True)
        v, y, steps, kappa = v / scale, y * scale, steps + taken, kappa / 100
    # The unknown is the difference from where Newton starts, so that what it adds is as exact as it is small; where it
    # turns out not to be small, another pass starts from where the first one ended.
    for _ in range(2):
        delta, v, y, taken = _newton(t, y)
        steps += taken
        if np.abs(delta * y).max() <= 256:  # rounding of v, relative to 1/y, below 1e-13
            break
    return (v * shrink).reshape(shape), (y / shrink).reshape(*shape[:-1], 1), steps


def _moved(base: Array, delta: Array, y: Array) -> tuple[Array, Array]:
    """Return v and the gradient by y, times y."""
    v = np.maximum(delta + delta.swapaxes(-1, -2) + base, 0)  # the sum of pairs first: exactly symmetric
    return v, 1 - y * v.sum(-1, keepdims=True)


def _newton(t: Array, c: Array, *, loose: bool = False) -> tuple[Array, Array, Array, int]:
    """Return (y - c, v, y, steps) of unit problems, from y = c."""
    # t_mn + c_m + c_n as if added exactly and rounded once: a tiny difference where edges are dear.
    pair, below = _two_sum(c, c.swapaxes(-1, -2))
    total, low = _two_sum(np.where(np.isinf(t), 0, t), pair)
    base, delta, y = np.where(np.isinf(t), t, total + (low + below)), np.zeros_like(c), c
    tolerance = 0.1 if loose else 1e-14 + _EPS * t.shape[-1] / 8
    v, residual = _moved(base, delta, y)
    near, steps = 0, -1
    while (steps := steps + 1) < _MAX_STEPS and not (worst := float(np.abs(residual).max())) <= tolerance:
        if worst < 1e-3:  # close; rounding may keep the residual from getting closer
            rounding = _EPS * float(np.abs(delta * y).max())
            near += worst < 1e4 * (_EPS + rounding)
            if near >= 20 or worst <= 4 * rounding:
                break
        u = _direction(v, y, residual)
        size = np.minimum(1, 0.9 / np.maximum(-u.min(-2, keepdims=True), 0.9))
        # The longest of the steps size, size/2, ... that shrinks the residual fourfold, or at whose end the dual, being
        # concave, does not fall yet: it has risen then. Slopes tell that where its values drown in rounding.
        for _ in range(60):
            step = size * u
            new_v, new_residual = _moved(base, delta + step * y, y + step * y)
            if np.abs(new_residual).max() <= worst / 4:
                break
            good = (new_residual * u / (1 + step)).sum(-2) >= 0
            if good.all():
                break
            size = np.where(good[..., None], size, size / 2)
        delta, y, v, residual = delta + step * y, y + step * y, new_v, new_residual
    return delta, v, y, steps


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b, rounded, and what rounding took from it."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _direction(v: Array, y: Array, residual: Array) -> Array:
    """Return u, the Newton step in units of y: ``(I + diag(y) (diag(A1) + A) diag(y)) u = residual``.

    The eigenvalues of the matrix are at least one. On a bipartite component one of them is exactly one, however large
    y: from a ratio of 1e10 on, rounding of the others would drown it, so that the matrix is not formed any more and its
    factor ``[I; E]`` (one row y_m e_m + y_n e_n an active edge) is reduced instead.
    """
    if float(y.max()) <= 1e5:
        adjacency = np.sign(v)
        diagonal = 1 + adjacency.sum(-1) * (y * y)[..., 0]
        return solver(set_diagonal(y * adjacency * y.swapaxes(-1, -2), diagonal))(residual)
    found = []
    for active, scale, right in zip(v > 0, y[..., 0], residual, strict=True):
        ends = np.stack(np.nonzero(np.triu(active)), 1)
        edges = np.zeros((len(ends), len(scale)))
        np.put_along_axis(edges, ends, scale[ends], 1)
        orthogonal, triangle = np.linalg.qr(np.concatenate([edges, np.eye(len(scale))]))
        found.append(np.linalg.solve(triangle, orthogonal[len(ends) :].T @ right))
    return np.stack(found)

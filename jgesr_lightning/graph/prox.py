r"""The exact prox of the log-degree penalty, through its dual in K unknowns.

.. math:: \mathrm{prox}_{g/\rho}(\theta) = \arg\min_{w \ge 0} -\beta \sum_k \log \deg_k(w) + \gamma 1^\top w
          + \tfrac{\rho}{2} \|w - \theta\|^2 \qquad (w, \theta: \text{edges})

Write :math:`s = \sqrt{\beta/\rho}`, :math:`w = s v`, :math:`t = (\theta - \gamma/\rho) / s`. Every instance is then the
one without parameters, :math:`\min_{v \ge 0} -\sum \log \deg(v) + \frac12 \|v - t\|^2`. With one dual variable a node,

.. math:: v_{mn} = \max(0, t_{mn} + y_m + y_n), \qquad \max_{y > 0} \sum_k \log y_k - \tfrac12 \sum_e v_e^2,

whose gradient is :math:`1/y - \deg(v)` and whose negative (generalised) Hessian is
:math:`\mathrm{diag}(1/y^2 + A 1) + A` with A the adjacency of the edges where v > 0. Damped semismooth Newton on it
reaches rounding in three or four steps from a start that has most of the active edges right (two sweeps of one
quadratic equation a node, `_start`), and in three from the solution of a neighbouring problem. The dual
variables of the problem as given are :math:`\lambda = \sqrt{\beta\rho}\, y = \beta / \deg(w)`.

Why numpy: at K = 20 a step is thirty operations on 3 kB, all overhead, and numpy's is a third of torch's on a CPU and a
twentieth of a kernel launch and its synchronisation. Nothing here touches d.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.graph.laplacian import a_tensor

Array = npt.NDArray[np.float64]

# What np.linalg.solve calls, without the checks that take longer than a small system itself.
_solve: Any = getattr(getattr(np.linalg, "_umath_linalg", None), "solve1", np.linalg.solve)

_EPS = float(np.finfo(np.float64).eps)
_MAX_STEPS = 200
_SWEEPS = 2
_STIFF = 10.0  # largest y from which a start out of balance is led to the solution
_CHEAP, _DEAREST = 1e6, 1e10
_THREADED = 8192  # elements from which BLAS may call threads for a matrix times a vector
_CHOLESKY_FROM = 64  # nodes from which half the operations matter more than a second library's overhead


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
    W, _, _ = prox_arrays(symmetric_part("theta", theta), beta, gamma, rho)
    result = torch.from_numpy(W.reshape(theta.shape))
    return result if theta.is_cpu else result.to(theta.device)


def symmetric_part(name: str, matrix: Tensor) -> Array:
    """Return that of a (..., K, K) tensor, diagonal zero, as (B, K, K); ValueError for another or one not finite."""
    a_tensor(name, matrix)
    shape = matrix.shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"{name} must have shape (..., K, K); got {tuple(shape)}")
    nodes = shape[-1]
    if nodes < 2:
        raise ValueError(f"{name}: a graph needs at least 2 nodes; got {nodes}")
    if matrix.dtype != torch.float64:
        matrix = matrix.to(torch.float64)
    try:
        given: Array = matrix.numpy()
    except (RuntimeError, TypeError):  # elsewhere, or part of a graph of gradients
        given = matrix.numpy(force=True)
    given = given.reshape(-1, nodes, nodes)
    array: Array = given + given.swapaxes(-1, -2)
    array *= 0.5
    flat = array.reshape(len(array), -1)
    flat[:, :: nodes + 1] = 0
    # The sum of squares is the quickest to tell; where it is not finite, it may only have overflowed.
    if not math.isfinite(np.vdot(flat, flat)) and not np.isfinite(array).all():
        raise ValueError(f"{name} holds values that are not finite")
    return array


def prox_arrays(
    theta: Array, beta: float, gamma: float, rho: float, dual: Array | None = None
) -> tuple[Array, Array, int]:
    """Return (W, dual variables lam, Newton steps) for a batch of arrays; see `prox_log_degree`.

    Args:
        theta: (B, K, K) symmetric, finite.
        beta: weight of the log barrier.
        gamma: weight of the sum of the edges.
        rho: inverse step.
        dual: (B, K) positive start, such as the lam of a neighbouring problem; changes the steps, not the result.
    """
    scale = math.sqrt(beta / rho)
    t = np.ascontiguousarray(theta) / scale  # own memory, contiguous
    if gamma:
        t -= gamma / math.sqrt(beta * rho)
    nodes = t.shape[-1]
    start = None if dual is None else dual / math.sqrt(beta * rho)
    solved = None
    if len(t) == 1 and nodes < _CHOLESKY_FROM:
        # A system that rounding made singular is left to `_solve_unit`.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            solved = _newton_undamped(t[0], None if start is None else start[0])
    v, y, steps = solved or _solve_tamed(t, start)
    v *= scale
    y = y * math.sqrt(beta * rho)
    return v, y, steps


def _solve_tamed(t: Array, start: Array | None) -> tuple[Array, Array, int]:
    """Return (v, y, Newton steps) of unit problems of any size; t is overwritten."""
    t.reshape(len(t), -1)[:, :: t.shape[-1] + 1] = -np.inf  # so that max(0, .) leaves the diagonal of v at zero
    shrink = _tame(t) if float(t.min(where=np.isfinite(t), initial=0)) < -_CHEAP else None
    if start is not None:
        start = start if shrink is None else start * shrink[:, 0]
        if _unbalance(t, start) > 0.9:  # of a problem that is no neighbour
            start = None
    if start is None:
        start = _start(t)
    v, y, steps = _solve_unit(t, start)
    if shrink is not None:
        v *= shrink
        y = y / shrink[:, 0]
    return v, y, steps


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


def _start(t: Array) -> Array:
    """Return (B, K) dual variables near the solution, most of the active edges right.

    A node for which all y are one number solves ``y (b + 2 n y) = 1``, n edges being active and b the sum of their t.
    The first guess takes all edges of all nodes, and of their t what is positive; a sweep takes the edges that are
    active at the last guess, and moves the neighbours half as much as the node. Two sweeps save more Newton steps.
    """
    highest = t.max(-1)
    y = np.full(highest.shape, _root(float(np.maximum(t, 0).sum()) / highest.size, 2 * (t.shape[-1] - 1)))
    y -= np.minimum(highest, 0) * 0.5
    if float(y.max()) > _STIFF:  # the sweeps' differences would lose their digits
        return y
    for _ in range(_SWEEPS):
        v = np.maximum(t + (y[:, :, None] + y[:, None, :]), 0)
        y = _swept(y, _row_sums(v), _row_sums(np.sign(v)))
    return y


def _root(b: float, a: float) -> float:
    """Return the positive y with ``y (b + a y) = 1``, or infinity where it is too large to tell."""
    total = b + math.sqrt(b * b + 4 * a)
    return 2 / total if total > 0 else math.inf


def _mean_field(mean: float, mean_square: float, edges: int) -> float:
    """Return about the y that all nodes share if the t of a node's edges are normally distributed with these means."""
    variance = mean_square - mean * mean
    if not variance > 1e-12 * mean * mean:
        return _root(edges * mean, 2 * edges)
    deviation = math.sqrt(variance)
    y = _root(edges * max(mean, 0.0), 2 * edges)
    for _ in range(3):
        z = (mean + 2 * y) / deviation
        share = 0.5 * math.erfc(-0.7071067811865476 * z)
        degree = edges * deviation * (z * share + 0.3989422804014327 * math.exp(-0.5 * z * z))
        slope = 2 * edges * share + 1e-3
        y = _root(degree - slope * y, slope)
    return y


def _swept(y: Array, degrees: Array, active: Array) -> Array:
    slope = np.maximum(active, _constants(y.shape[-1])[0])
    slope *= 1.5
    less_b = slope * y
    less_b -= degrees
    root = less_b * less_b
    slope *= 4
    root += slope
    np.sqrt(root, out=root)
    root -= less_b
    result: Array = 2 / root
    return result


def _newton_undamped(t: Array, start: Array | None) -> tuple[Array, Array, int] | None:
    """Return (v, y, Newton steps) of one small unit problem, or None where full steps do not lead there.

    From `start` (K,), or as `_start` does; t is (K, K).

    Nearly every problem that a solver meets is so tame. A step is then a dozen operations on 3 kB, each of which takes
    as long to call as to do, and what `_newton` does for batches and against rounding would cost several times more.
    """
    nodes = len(t)
    ones, zeros = _constants(nodes)
    both = np.empty((2 * nodes, nodes))  # v over its signs, so that one product sums the rows of both
    v, hessian = both[:nodes], both[nodes:]
    diagonal = hessian.reshape(-1)[:: nodes + 1]
    y = start
    if y is None:
        # The diagonal, which is what edges without weight have, hardly changes a guess.
        guess = _mean_field(float(t.dot(ones).dot(ones)) / nodes**2, float(np.vdot(t, t)) / nodes**2, nodes - 1)
        if not guess < 8:
            return None
        y = ones * guess
    t.reshape(-1)[:: nodes + 1] = -np.inf  # so that max(0, .) leaves the diagonal of v at zero
    steps = 0
    for evaluation in range(-_SWEEPS if start is None else 0, 12):
        np.add(y[:, None], y, out=v)
        v += t
        np.maximum(v, zeros, out=v)
        np.sign(v, out=hessian)
        degrees, active = both.dot(ones).reshape(2, nodes)
        if evaluation < 0:
            y = _swept(y, degrees, active)
            continue
        inverse = ones / y
        gradient = inverse - degrees
        residual = gradient * y
        square = float(residual.dot(residual))
        if square <= (4e-15 * nodes) ** 2:
            values = y.tolist()
            largest, smallest = max(values), min(values)
            # v is as exact as the sum of t <= v <= 1/y and y: not exact enough where both are large.
            return (v[None], y[None], steps) if largest < min(8, 1e3 * smallest) else None
        if not square < 1e6:
            return None
        for _ in range(6):
            curvature = inverse * inverse
            np.add(active, curvature, out=diagonal)
            step = _solve(hessian, gradient)
            y = y + step
            steps += 1
            if not 1e-12 < square < 1e-3:
                break
            # Close: where the same edges stay active the degrees are linear in y, so that the next gradient is known
            # before they are summed again. The first and the last of such steps are summed.
            last, inverse = inverse, ones / y
            curvature *= step
            curvature -= last
            gradient = curvature + inverse
            residual = gradient * y
            square = float(residual.dot(residual))
    return None


@functools.lru_cache(maxsize=64)
def _constants(nodes: int) -> tuple[Array, Array]:
    """Return ones (K,) and zeros (K, K), which are made once and are not for writing."""
    ones, zeros = np.ones(nodes), np.zeros((nodes, nodes))
    ones.flags.writeable = zeros.flags.writeable = False
    return ones, zeros


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
    result: Array = np.where(np.isinf(t), t, total)
    return result


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
    return float(np.abs(1 - y * _row_sums(np.maximum(t + y[:, :, None] + y[:, None, :], 0))).max())


def _newton(t: Array, c: Array, *, loose: bool = False) -> tuple[Array, Array, Array, int]:
    """Return (y - c, v, y, steps) of the unit problem, from y = c."""
    base = _shifted(t, c) if float(c.max()) > 8 else t + (c[:, :, None] + c[:, None, :])
    delta = np.zeros_like(c)
    y, v = c, np.maximum(base, 0)
    residual = 1 - y * _row_sums(v)  # the gradient, times y
    worst = float(np.abs(residual).max())
    tolerance = 0.1 if loose else 1e-14 + _EPS * base.shape[-1] / 8
    best, stalled = math.inf, 0
    for steps in range(_MAX_STEPS):
        if worst <= tolerance:
            return delta, v, y, steps
        if worst < 1e-3:  # close; rounding may keep the residual from getting closer
            rounding = _EPS * float((np.abs(delta) * y).max())
            stalled = stalled + 1 if best / 2 < worst < 1e4 * (_EPS + rounding) else 0
            best = min(best, worst)
            if stalled >= 20 or worst <= 4 * rounding:
                return delta, v, y, steps
        u = _newton_direction(v, y, residual)
        shortest = float(u.min())
        size = np.ones((len(u), 1)) if shortest > -0.9 else np.minimum(1, 0.9 / np.maximum(-u.min(-1), 0.9))[:, None]
        state = _move(base, delta, y, u if shortest > -0.9 else size * u)
        if state.worst > worst / 4:
            state = _line_search(base, delta, y, v, residual, u, size, state)
        delta, y, v, residual, worst = state
    return delta, v, y, _MAX_STEPS


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
    residual = 1 - y * _row_sums(v)
    return _State(delta, y, v, residual, float(np.abs(residual).max()))


def _row_sums(matrix: Array) -> Array:
    """Sum the last axis; by a product where that is so small that it stays on the calling thread: faster there."""
    if matrix.size > _THREADED:
        return np.asarray(matrix.sum(-1), dtype=np.float64)
    nodes = matrix.shape[-1]
    sums: Array = matrix.reshape(-1, nodes).dot(_constants(nodes)[0])
    return sums.reshape(matrix.shape[:-1])


def _line_search(
    base: Array,
    delta: Array,
    y: Array,
    v: Array,
    residual: Array,
    u: Array,
    size: Array,
    state: _State,
) -> _State:
    """Return the state after the longest of the steps size, size/2, ... that the dual does not object to.

    A step is taken where the slope along it has not turned round by more than 0.8 of what it was and the dual has not
    fallen (Hager and Zhang's form of Armijo's rule, which still tells up from down when the dual's change is rounding).
    `state` is the one after the whole step, which is only questioned because its residual did not shrink fourfold.
    """
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
    nodes = v.shape[-1]
    adjacency = np.sign(v)
    hessian = y[:, :, None] * y[:, None, :]
    hessian *= adjacency
    hessian.reshape(len(y), -1)[:, :: nodes + 1] = _row_sums(adjacency) * (y * y) + 1
    if nodes < _CHOLESKY_FROM:
        return np.asarray(np.linalg.solve(hessian, residual[..., None])[..., 0], dtype=np.float64)
    factor, _ = torch.linalg.cholesky_ex(torch.from_numpy(hessian))
    solution: Array = torch.cholesky_solve(torch.from_numpy(residual)[..., None], factor)[..., 0].numpy()
    return solution


def _direction_by_qr(active: npt.NDArray[np.bool_], y: Array, residual: Array) -> Array:
    size = len(y)
    rows, columns = np.nonzero(np.triu(active))
    factor = np.zeros((len(rows) + size, size))
    factor[np.arange(len(rows)), rows] = y[rows]
    factor[np.arange(len(rows)), columns] = y[columns]
    factor[len(rows) :] = np.eye(size)
    orthogonal, triangle = np.linalg.qr(factor)
    # The least-squares solution of [E; I] u = [0; residual] has the normal equations above.
    return np.asarray(np.linalg.solve(triangle, orthogonal[len(rows) :].T @ residual), dtype=np.float64)

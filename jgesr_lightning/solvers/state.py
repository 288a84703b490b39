"""The iterates of a solve: where they start, which of two to go on from, and what they stand for at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from jgesr_lightning.graph.arrays import Array, host, of, positive_part, repeated, set_diagonal
from jgesr_lightning.graph.problem import Stationarity
from jgesr_lightning.solvers.models import Models

_ABSURD = 1e4  # a step this many times longer than all the data together: the iteration is on its way to infinity
RUNNING, CONVERGED, MAX_ITER, DIVERGED, NOT_FINITE, CARE = range(6)
"""Why a problem stands still, as numbers that can be computed with: `CARE` until its prox has been looked after."""
REASONS = {CONVERGED: "converged", MAX_ITER: "max_iter", DIVERGED: "diverged"}


@dataclass(frozen=True)
class Solution:
    """A graph, and how it was come by.

    Attributes:
        graphs: (G, K, K) adjacency matrices.
        iterations: steps taken.
        reason: "converged"; "max_iter"; "diverged": the next step would not have been finite, or was absurdly long, and
            what is returned is the last one before it.
        step_norm: last ||Psi+ - Psi||_F.
        objective: J at the start and after every step. The start's is infinite where a client had no edge.
        rose: whether J ever rose by more than rounding.
        stationarity: how far the conditions of a stationary point fail, of models and graph; see `Stationarity`.
        seconds: of the iterations alone.
        newton_steps: of all prox evaluations together.
        rho: inverse step at the end; not a number where there is none.
        backtracks: steps refused because rho was too small.
        restarts: extrapolated steps refused because J would have risen.
    """

    graphs: npt.NDArray[np.float64]
    iterations: int
    reason: str
    step_norm: float
    objective: list[float] = field(default_factory=list)
    rose: bool = False
    stationarity: tuple[float, float] = (math.nan, math.nan)
    seconds: float = 0.0
    newton_steps: int = 0
    rho: float = math.nan
    backtracks: int = 0
    restarts: int = 0

    @property
    def converged(self) -> bool:
        """Whether the stopping rule was met."""
        return self.reason == "converged"


def rises(objective: list[float], tolerance: float) -> bool:
    """Whether a trace goes up anywhere by more than `tolerance` of its size."""
    return any(b > a + tolerance * max(1.0, abs(a)) for a, b in pairwise(objective))


@dataclass(frozen=True)
class State:
    """The iterates of B problems with G graphs each, N = B G, and what their next steps start from.

    Attributes:
        W, D: graphs and squared distances of the models, (N, K, K).
        W_before, D_before: the same one step earlier.
        D_step: squared distances of the last step, (N, K, K), where details are asked for.
        dual: (N, K) of the last prox, or None before the first.
        rho, inertia, value, step_norm: inverse step, Nesterov's t, J and ||Psi+ - Psi||_F, (B,).
        bound: square of the length of a step that is absurd, (B,).
        reason: (B,) see `solution`; a problem of which it is not RUNNING stands still.
        iterations, tries, backtracks, restarts: (B,) counts; `tries` since the last accepted step.
        trace: J at the start and after every step, (max_iter + 2, B); written in place.
        newton_steps: of all prox evaluations.
    """

    W: Array
    D: Array
    W_before: Array
    D_before: Array
    D_step: Array
    dual: Array | None
    rho: Array
    inertia: Array
    value: Array
    step_norm: Array
    bound: Array
    reason: Array
    iterations: Array
    tries: Array
    backtracks: Array
    restarts: Array
    trace: Array
    newton_steps: int = 0


def begun(models: Models, max_iter: int, rho: float = math.nan) -> State:
    """Return the start: Psi_0, and w_0 = max(0, cosine similarity of its rows)."""
    start = models.start()
    W = set_diagonal(positive_part(start.cosines), 0.0)
    models.problem = models.problem.scaled_to(start.distances)
    value = models.problem.value(start.squares, start.distances, W)
    xp, nothing = of(W), value * 0  # not a number where the start has no value, and then replaced
    zeros = xp.where(nothing == 0, nothing, 0.0)
    none = xp.where(zeros > 0, 1, 0)
    trace = repeated(zeros[None], max_iter + 2)
    trace[0] = value
    return State(
        W=W, D=start.distances, W_before=W, D_before=start.distances, D_step=0 * start.distances, dual=None,
        rho=zeros + rho, inertia=zeros + 1, value=value, step_norm=zeros + math.inf, bound=(_ABSURD * start.scale) ** 2,
        reason=xp.where(xp.isfinite(start.scale), none + RUNNING, none + NOT_FINITE),
        iterations=none, tries=none, backtracks=none, restarts=none, trace=trace,
    )  # fmt: skip


def chosen(accepted: Array, new: State, refused: State) -> State:
    """Return the new state of problems whose step was accepted, and the refused one of the others."""
    fields = {}
    for name, value in vars(new).items():
        other = getattr(refused, name)
        if other is None or value is other or name in ("trace", "newton_steps"):
            fields[name] = value
            continue
        chosen = spread(accepted, value) if value.shape[:1] != accepted.shape else accepted
        fields[name] = of(value).where(chosen.reshape(-1, *[1] * (value.ndim - 1)), value, other)
    return State(**fields)


def spread(numbers: Array, graphs: Array) -> Array:
    """Give each graph what is its problem's, (B, ...) to (N, ...)."""
    if len(numbers) in (1, len(graphs)):
        return numbers
    return repeated(numbers, len(graphs) // len(numbers))


def resumed(state: State) -> State:
    """Return the state in which those go on that stood still until their prox is looked after."""
    return replace(state, reason=of(state.W).where(state.reason == CARE, 0 * state.reason + RUNNING, state.reason))


def stationarity(models: Models, state: State) -> Stationarity:
    """Return how far the current iterates are from stationary points."""
    gradient, parts = models.gradient(models.problem.operator(state.W))
    return models.problem.stationarity(gradient, parts, state.D, state.W)


def stopped_where_stationary(models: Models, state: State, eps: float) -> State:
    """Return the state in which those stand still that are stationary."""
    left = stationarity(models, state)
    stopped = (state.reason == RUNNING) & (left.models < eps) & (left.graph < eps)
    return replace(state, reason=of(state.W).where(stopped, 0 * state.reason + CONVERGED, state.reason))


def solutions(models: Models, state: State, rounding: float, seconds: float) -> tuple[Solution, ...]:
    """Return the solutions that states stand for; ValueError where what arrived was not finite."""
    reasons = host(state.reason).tolist()
    if NOT_FINITE in reasons:
        raise ValueError("received holds values that are not finite, or whose squares are not")
    left = stationarity(models, state)
    graphs = host(state.W).reshape(models.problems, -1, *state.W.shape[-2:])
    columns = (state.iterations, state.step_norm, state.rho, state.backtracks, state.restarts, *left)
    solutions = []
    for b, row in enumerate(zip(*(host(column).tolist() for column in columns), strict=True)):
        iterations, step_norm, rho, backtracks, restarts, of_models, of_graph = row
        objective = host(state.trace[: iterations + 1, b]).tolist()
        reason = REASONS.get(reasons[b], "max_iter")
        solutions.append(
            Solution(
                graphs[b], iterations, reason, step_norm, objective, rises(objective, rounding),
                (of_models, of_graph), seconds / models.problems, state.newton_steps, rho, backtracks, restarts,
            )
        )  # fmt: skip
    return tuple(solutions)

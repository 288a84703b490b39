"""What solvers share: the loop, the iterates it goes through, and how each problem was solved."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from jgesr_lightning.graph.arrays import Array, blind, host, of, positive_part
from jgesr_lightning.graph.gram import distances_from_gram
from jgesr_lightning.graph.problem import Stationarity
from jgesr_lightning.graph.prox import QUIET, Prox
from jgesr_lightning.solvers.models import Models, Sums

RUNNING, CONVERGED, MAX_ITER, DIVERGED, CARE = range(5)
"""Why a problem stands still, as numbers that can be computed with: `CARE` until its prox has been looked after."""
_ROUNDING = 1e-9  # how much of its size J may rise by before it counts as having risen
REASONS = {CONVERGED: "converged", MAX_ITER: "max_iter", DIVERGED: "diverged"}


@dataclass(frozen=True)
class Solution:
    """A graph, and how it was come by.

    Attributes:
        graphs: (G, K, K) adjacency matrices.
        iterations: steps taken.
        reason: "converged"; "max_iter"; "diverged": the next step would not have been finite, or was absurdly long, and
            what is returned is the last one before it; or `max_iter` steps left J above its start.
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
    objective: list[float]
    rose: bool
    stationarity: tuple[float, float]
    seconds: float
    newton_steps: int
    rho: float
    backtracks: int
    restarts: int

    @property
    def converged(self) -> bool:
        """Whether the stopping rule was met."""
        return self.reason == "converged"


class State(NamedTuple):
    """The iterates of B problems with G graphs each, and what their next steps start from.

    Attributes:
        W, D: graphs and squared distances of the models, (B, G, K, K).
        W_ahead, D_ahead: the same where the next step is taken from; others under extrapolation.
        dual: (B, G, K) of the last prox, or None before the first.
        inertia, rho, value, step_norm: Nesterov's t, inverse step, J and ||Psi+ - Psi||_F, (B,).
        reason: (B,) see `RUNNING`; a problem of which it is another stands still.
        iterations, backtracks, restarts: (B,) counts.
        trace: whether a step was taken, and J after it, (B,) each, of every step tried; the same list all along.
        newton_steps: of all prox evaluations.
    """

    W: Array
    D: Array
    W_ahead: Array
    D_ahead: Array
    dual: Array | None
    inertia: Array
    rho: Array
    value: Array
    step_norm: Array
    reason: Array
    iterations: Array
    backtracks: Array
    restarts: Array
    trace: list[tuple[Array, Array]]
    newton_steps: int = 0


@dataclass(frozen=True)
class Solver(ABC):
    """`init`, and `step` until all problems have a reason to stop; or `solve`, which does just that.

    Attributes:
        eps: what the stopping rule compares with.
        max_iter: stop after that many steps.
        stop: "step": when ||Psi+ - Psi||_F < eps, as printed (under backtracking, times what halvings have made of the
            step). "stationarity": when both of `Stationarity` are below eps, checked every `pace` steps.
    """

    eps: float = 1e-3
    max_iter: int = 500
    stop: str = "step"

    pace: ClassVar[int] = 1
    """Steps from one look at an accelerator's numbers, or one check of stationarity, to the next."""

    def solve(self, models: Models) -> tuple[Solution, ...]:
        """Iterate; `models` holds the result afterwards. Return how each problem was solved.

        Raises:
            ValueError: what arrived is not finite.
        """
        begin, steps = time.perf_counter(), 0
        with QUIET():  # what is not finite is refused
            state = self.init(models)
            if not np.isfinite(host(models.size)).all():
                raise ValueError("received holds values that are not finite, or whose squares are not")
            while True:
                reasons, xp = host(state.reason).tolist(), of(state.W)
                if CARE in reasons:
                    state = state._replace(reason=xp.where(state.reason == CARE, RUNNING, state.reason))
                    state = self.step(models, state, careful=True)
                elif RUNNING not in reasons:
                    return self._solutions(models, state, time.perf_counter() - begin)
                for _ in range(self.pace if blind(state.W) else 1):
                    state, steps = self.step(models, state), steps + 1
                    if self.stop == "stationarity" and steps % self.pace == 0:
                        left = _stationarity(models, state)
                        going = (state.reason == RUNNING) | (state.reason == CARE)  # what waits for care may be there
                        there = going & (left.models < self.eps) & (left.graph < self.eps)
                        state = state._replace(reason=xp.where(there, CONVERGED, state.reason))

    def init(self, models: Models) -> State:
        """Return the start: Psi_0, and w_0 = max(0, cosine similarity of its rows)."""
        cosines, D = models.start()
        models.problem = models.problem.scaled_to(D)
        W = models.problem.first_graph(cosines, D)
        value, zeros = models.problem.value(models.squares, D, W), 0 * models.size
        none = of(W).where(zeros > 0, 1, 0)
        return State(
            W, D, W, D, None, zeros + 1, zeros + getattr(self, "rho", math.nan), value, zeros + math.inf,
            none + RUNNING, none, none, none, [(none == none, value)],
        )  # fmt: skip

    @abstractmethod
    def step(self, models: Models, state: State, *, careful: bool = False) -> State:
        """Return the next iterates; the same ones of a problem whose step is refused, or that has a reason to stop."""

    def _moved(self, models: Models, state: State, proposed: Sums, graph: Prox) -> State:
        """Return the state at the proposed models and a graph."""
        xp, D, iterations = of(state.W), distances_from_gram(proposed.gram), state.iterations + 1
        value, step_norm = models.problem.value(proposed.squares, D, graph.W), positive_part(proposed.step) ** 0.5
        reason = xp.where(iterations >= self.max_iter, MAX_ITER, RUNNING)
        if self.stop == "step":
            reason = xp.where(step_norm * self._halvings(state) < self.eps, CONVERGED, reason)
        return state._replace(
            W=graph.W, D=D, W_ahead=graph.W, D_ahead=D, dual=graph.dual, value=value, step_norm=step_norm,
            reason=reason, iterations=iterations, newton_steps=state.newton_steps + graph.steps,
        )  # fmt: skip

    def _halvings(self, state: State) -> Array | float:
        """Return how many times shorter than at the start a step is: so short, it need not be close to anything."""
        return 1.0

    def _settled(self, models: Models, state: State, new: State, graph: Prox, good: Array) -> State:
        """Return the new state of problems whose step is good, and have their models follow; the old one of others.

        Where the prox needs care the step is neither: the problem waits for it. Others have it refused.
        """
        xp, running = of(state.W), state.reason == RUNNING
        judged = running if isinstance(graph.solved, bool) else running & graph.solved.all(-1)
        accepted = judged & good
        state.trace.append((accepted, new.value))
        if not blind(accepted) and accepted.all():
            models.accept()
            return new
        waiting = state._replace(reason=xp.where(running ^ judged, CARE, state.reason), newton_steps=new.newton_steps)
        old = self._refused(waiting, judged & ~good)
        if not blind(accepted) and not accepted.any():
            return old
        models.accept(accepted)

        def chosen(value: Any, other: Any) -> Any:
            if value is other or other is None or isinstance(value, int):
                return value
            return xp.where(over(accepted, value.ndim), value, other)

        return State(*map(chosen, new, old))

    def _refused(self, state: State, which: Array) -> State:
        """Return the state from which problems whose step was no good go on, or do not."""
        return state

    def _solutions(self, models: Models, state: State, seconds: float) -> tuple[Solution, ...]:
        reasons = host(state.reason).tolist()
        taken, values = (host(of(state.W).stack(each, 1)) for each in zip(*state.trace, strict=True))
        graphs, left = host(state.W), _stationarity(models, state)
        columns = (state.iterations, state.step_norm, state.rho, state.backtracks, state.restarts, *left)
        solutions = []
        for b, row in enumerate(zip(*(host(column).tolist() for column in columns), strict=True)):
            iterations, step_norm, rho, backtracks, restarts, *failures = row
            J = values[b][taken[b]].tolist()
            rose = any(after > before + _ROUNDING * max(1.0, abs(before)) for before, after in pairwise(J))
            failed = failures[0], failures[1]
            reason = self._ended(reasons[b], J, failed)
            solutions.append(
                Solution(
                    graphs[b], iterations, reason, step_norm, J, rose, failed, seconds / models.problems,
                    state.newton_steps, rho, backtracks, restarts,
                )
            )  # fmt: skip
        return tuple(solutions)

    def _ended(self, reason: int, J: list[float], failed: tuple[float, float]) -> str:
        """Return why a problem stands still; of one at `max_iter`, whether the last step got there, or all led away."""
        if reason == MAX_ITER and self.stop == "stationarity" and all(part < self.eps for part in failed):
            return REASONS[CONVERGED]
        start = next((value for value in J if value < math.inf), math.inf)  # that of a client without edges is not
        if reason == MAX_ITER and J[-1] > start + _ROUNDING * max(1.0, abs(start)):
            return REASONS[DIVERGED]
        return REASONS[reason]


def over(numbers: Array, ndim: int = 4) -> Array:
    """Return what is each problem's, (B,), beside what is each graph's."""
    return numbers.reshape(-1, *[1] * (ndim - 1))


def _stationarity(models: Models, state: State) -> Stationarity:
    """Return how far the current iterates are from stationary points."""
    gradient, parts = models.gradient(models.problem.operator(state.W))
    return models.problem.stationarity(gradient, parts, state.D, state.W)

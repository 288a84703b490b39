"""Alternating minimisation of the joint objective J: the graph for fixed models, the models for a fixed graph."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from jgesr_lightning.graph.arrays import all_of, blind, host, of, write_rows
from jgesr_lightning.graph.gram import distances_from_gram
from jgesr_lightning.graph.prox import QUIET
from jgesr_lightning.solvers.models import Models
from jgesr_lightning.solvers.state import (
    CARE,
    CONVERGED,
    MAX_ITER,
    RUNNING,
    Solution,
    State,
    begun,
    chosen,
    resumed,
    solutions,
    stopped_where_stationary,
)

_LOOK = 4  # steps from one look at an accelerator's numbers to the next


@dataclass(frozen=True)
class Alternating:
    """Learn the graph to convergence, filter the models over it in closed form, and again, until they stand still.

    Both halves are exact minimisations of the same J, so J never rises. A step is one graph and one filtering; the
    objective trace is J(Psi_0, w_1), J(Psi_1, w_1), J(Psi_2, w_2), ...

    Attributes:
        eps: what the stopping rule compares with.
        max_iter: stop after that many steps.
        stop: "step": when ||Psi+ - Psi||_F < eps; "stationarity": when both of `Stationarity` are below eps.
        rounding: how much of its size J may rise by before it counts as having risen.
    """

    eps: float = 1e-3
    max_iter: int = 100
    stop: str = "step"
    rounding: float = 1e-9

    def solve(self, models: Models) -> tuple[Solution, ...]:
        """Alternate; `models` holds the result afterwards. Return how each problem was solved.

        Raises:
            ValueError: what arrived is not finite.
        """
        begin = time.perf_counter()
        with QUIET():  # what is not finite is refused
            state = self.init(models)
            while True:
                reasons = host(state.reason)
                if CARE in reasons:
                    state = self.step(models, resumed(state), careful=True)
                elif RUNNING in reasons:
                    for _ in range(_LOOK if blind(state.W) else 1):
                        state = self.step(models, state)
                else:
                    return solutions(models, state, self.rounding, time.perf_counter() - begin)

    def init(self, models: Models) -> State:
        """Return the start: Psi_0, and no edges."""
        state = begun(models, self.max_iter)
        return replace(state, W=0 * state.W)

    def step(self, models: Models, state: State, *, careful: bool = False) -> State:
        """Return the next iterates, or the same ones with a reason to stop."""
        problem, xp = models.problem, of(state.W)
        found = problem.learnt_graph(state.D, state.W, careful=careful)
        filtered = models.filter(problem.operator(found.W))
        D, step_norm = distances_from_gram(filtered.gram), filtered.step[0] ** 0.5
        value = problem.value(filtered.squares, D, found.W)
        first = problem.value(models.squares, state.D, found.W)
        state.trace[0] = xp.where(state.iterations == 0, first, state.trace[0])
        iterations = state.iterations + 1
        write_rows(state.trace, iterations, value)
        reason = xp.where(iterations >= self.max_iter, MAX_ITER + 0 * iterations, RUNNING + 0 * iterations)
        if self.stop == "step":
            reason = xp.where(step_norm < self.eps, CONVERGED + 0 * iterations, reason)
        accepted = (state.reason == RUNNING) & all_of(found.solved, len(value))
        new = replace(
            state, W=found.W, D=D, dual=found.dual, value=value, step_norm=step_norm, reason=reason,
            iterations=iterations, newton_steps=state.newton_steps + found.steps,
        )  # fmt: skip
        cared = xp.where((state.reason == RUNNING) & ~accepted, CARE + 0 * iterations, state.reason)
        whole = not blind(D) and bool(accepted.all())
        models.accept(None if whole else accepted)
        new = new if whole else chosen(accepted, new, replace(state, reason=cared, newton_steps=new.newton_steps))
        return stopped_where_stationary(models, new, self.eps) if self.stop == "stationarity" else new

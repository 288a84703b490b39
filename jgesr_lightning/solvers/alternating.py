"""Alternating minimisation of the joint objective J: the graph for fixed models, the models for a fixed graph."""

from __future__ import annotations

from dataclasses import dataclass

from jgesr_lightning.graph.arrays import of
from jgesr_lightning.solvers.models import Models
from jgesr_lightning.solvers.solver import RUNNING, Solver, State


@dataclass(frozen=True)
class Alternating(Solver):
    """Learn the graph to convergence, filter the models over it in closed form, and again, until they stand still.

    Both halves are exact minimisations of the same J, so J never rises. A step is one graph and one filtering; the
    objective trace is J(Psi_0, w_1), J(Psi_1, w_1), J(Psi_2, w_2), ... See `Solver` for eps, max_iter and stop.
    """

    max_iter: int = 100

    def init(self, models: Models) -> State:
        """Return the start: Psi_0, and no edges."""
        state = super().init(models)
        return state._replace(W=0 * state.W)

    def step(self, models: Models, state: State, *, careful: bool = False) -> State:
        """Return the next iterates; see `Solver`."""
        problem = models.problem
        graph = problem.learnt_graph(state.D, careful=careful)
        psi = models.filter(problem.operator(graph.W))

        first = problem.value(models.squares, state.D, graph.W)
        there, before = state.trace[0]
        state.trace[0] = there, of(first).where(state.iterations == 0, first, before)
        return self._settled(models, state, self._moved(models, state, psi, graph), graph, state.reason == RUNNING)

"""Alternating minimisation of the joint objective J: the graph for fixed models, the models for a fixed graph."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from jgesr_lightning.graph.learning import learn_arrays
from jgesr_lightning.graph.prox import Array
from jgesr_lightning.solvers.signals import Signals
from jgesr_lightning.solvers.solution import Penalties, Solution, rises


@dataclass(frozen=True)
class Alternating:
    """Learn the graph to convergence, filter the models over it in closed form, and again, until they stand still.

    Both halves are exact minimisations of the same J, so J never rises. A step is one graph and one filtering; the
    objective trace is J(Psi_0, w_1), J(Psi_1, w_1), J(Psi_2, w_2), ...

    Attributes:
        penalties: alpha, beta, gamma, mu; gamma positive.
        eps: stop when ||Psi+ - Psi||_F < eps.
        max_iter: stop after that many steps.
        rounding: how much of its size J may rise by before it counts as having risen.
    """

    penalties: Penalties
    eps: float = 1e-3
    max_iter: int = 100
    rounding: float = 1e-9

    def solve(self, signals: Signals, weights: Array) -> Solution:
        """Alternate until the step is shorter than eps or `max_iter` is reached.

        Args:
            signals: the models; holds the solution afterwards.
            weights: diagonal of Z, (K,) positive: the same that `signals` measures its residual with.

        Raises:
            ValueError: what arrived is not finite.
        """
        begin = time.perf_counter()
        penalties = self.penalties
        start = signals.start()
        residual = signals.residual() if start.residual is None else start.residual
        distances, W = start.distances, None
        objective: list[float] = []
        newton_steps, step_norm = 0, math.inf
        for _ in range(self.max_iter):
            W, taken = learn_arrays(penalties.alpha * distances + penalties.gamma, penalties.beta, W)
            newton_steps += taken
            if not objective:
                objective.append(penalties.objective(residual, distances, W))
            laplacian = np.apply_along_axis(np.diag, -1, W.sum(-1)) - W
            moments = signals.propose_filtered((2 * penalties.alpha / penalties.mu) * laplacian, weights)
            signals.accept()
            distances, step_norm = moments.distances, math.sqrt(moments.step_sq)
            assert moments.residual is not None
            objective.append(penalties.objective(moments.residual, distances, W))
            if step_norm < self.eps:
                break
        assert W is not None
        return Solution(
            graphs=W,
            iterations=len(objective) - 1,
            reason="converged" if step_norm < self.eps else "max_iter",
            step_norm=step_norm,
            objective=objective,
            rose=rises(objective, self.rounding),
            seconds=time.perf_counter() - begin,
            newton_steps=newton_steps,
        )

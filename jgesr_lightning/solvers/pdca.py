r"""Algorithm 1 of the paper: the proximal DC algorithm for the joint objective J over models and graph.

Linearising f and h of the split J = f + g - h (see `graph`) at the same point leaves the gradient of
:math:`s = f - h = \text{fidelity} + \alpha \langle w, d(\Psi) \rangle`, so that one step (`PDCA.step`) is

.. math:: \Psi^+ &= \Psi - \tfrac1\rho \big(\mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi\big) \\
          w^+ &= \mathrm{prox}_{g/\rho}\big(w - \tfrac\alpha\rho\, d(\Psi)\big)

with the old (Psi, w) on both right-hand sides. Start: Psi_0, and w_0 = max(0, cosine similarity of its rows).

Several problems advance at once, each until its own rule stops it, and then stands still. On an accelerator a step
looks at nothing; whether all have stopped is looked at every `pace` steps, and what stands still is the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jgesr_lightning.graph.arrays import Array, blind, of, per_problem, positive_part, repeated
from jgesr_lightning.graph.gram import distances_from_gram
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.models import Models, Sums
from jgesr_lightning.solvers.solver import DIVERGED, Solver, State

_MAX_DOUBLINGS = 100
_RESTART_EVERY = 200


@dataclass(frozen=True)
class PDCA(Solver):
    r"""The solver; see `Solver` for eps, max_iter and stop.

    Attributes:
        rho: inverse step (the first one, under backtracking).
        backtracking: double rho until s lies below its quadratic majorant at the new point, see `_majorised`. As the
            new point minimises majorant plus g, J does not rise. (The majorisation of f alone, with h convex, would
            imply this one; f is quartic in Psi and would ask for far shorter steps.) Else the step is fixed.
        accelerated: take the step from Psi + theta (Psi - Psi_before), w likewise, with Nesterov's theta; one that
            raises J is thrown away, and the extrapolation starts again from nothing. This is pDCAe (Wen, Chen, Pong
            2018) with h, too, linearised at the extrapolated point, so that f and h still cancel to s, and with its
            restart as a safeguard.
    """

    rho: float = 1.0
    backtracking: bool = False
    accelerated: bool = False

    pace: ClassVar[int] = 10

    def step(self, models: Models, state: State, *, careful: bool = False) -> State:
        """Return the next iterates; see `Solver`."""
        problem, rho, details = models.problem, _each(state.rho), self.backtracking or self.accelerated
        momentum, W, D = self._extrapolated(state)
        # The two lines of Algorithm 1.
        psi = models.propose(problem.operator(W), 1 / rho, momentum, details=details)
        graph = problem.prox_graph(W, D, _spread(rho, W), state.dual, careful=careful)

        new = self._moved(models, state, psi, graph)
        good = (psi.step <= models.bound) & (new.value < math.inf)  # neither holds of what is not a number
        ahead = state.inertia > 1
        if self.accelerated:
            inertia = of(W).where(new.iterations % _RESTART_EVERY == 0, 1.0, _following(state.inertia))
            new = new._replace(W_before=state.W, D_before=state.D, inertia=inertia)
            good = good & (~ahead | (new.value <= state.value))
        if details:
            new = new._replace(D_step=distances_from_gram(psi.step_gram))
        if self.backtracking:
            good = good & (ahead | self._majorised(models.problem, state, new, psi))
        return self._settled(models, state, new, graph, good)

    def _extrapolated(self, state: State) -> tuple[Array | None, Array, Array]:
        """Return theta, (B, 1, 1) or None, and W and D at Psi + theta (Psi - Psi_before)."""
        if not self.accelerated or (not blind(state.inertia) and (state.inertia == 1).all()):
            return None, state.W, state.D
        theta = _each((state.inertia - 1) / _following(state.inertia))
        each = _spread(theta, state.W)
        W = state.W + each * (state.W - state.W_before)
        # The parallelogram identity.
        D = (1 + each) * state.D - each * state.D_before + each * (1 + each) * state.D_step
        return theta, W, positive_part(D)

    @staticmethod
    def _majorised(problem: Problem, old: State, new: State, psi: Sums) -> Array:
        r"""Whether s lies below its quadratic majorant; see `Problem.curvature`.

        .. math:: s(new) - s(old) - \langle \nabla s(old), new - old \rangle
                  \le \tfrac\rho2 (\|\Psi^+ - \Psi\|_F^2 + \|w^+ - w\|^2)
        """
        change = new.W - old.W
        curvature = problem.curvature(psi.step_squares or [], old.W, change, new.D_step, new.D - old.D)
        squares = per_problem((problem.unit * change * change).sum((-1, -2)) / 2, len(psi.step))
        return curvature <= old.rho / 2 * (psi.step + squares)

    def _refused(self, state: State, which: Array) -> State:
        """Extrapolation starts again from nothing; a step is halved, or there is no going on."""
        xp, ahead = of(state.W), state.inertia > 1
        restarted, halved = which & ahead, which & ~ahead
        state = state._replace(
            inertia=xp.where(restarted, 1.0, state.inertia), restarts=state.restarts + restarted,
            reason=xp.where(halved & (state.backtracks >= _MAX_DOUBLINGS * self.backtracking), DIVERGED, state.reason)
        )  # fmt: skip
        if not self.backtracking:
            return state
        return state._replace(rho=xp.where(halved, 2 * state.rho, state.rho), backtracks=state.backtracks + halved)


def _following(inertia: Array) -> Array:
    return (1 + (1 + 4 * inertia * inertia) ** 0.5) / 2


def _each(numbers: Array) -> Array:
    return numbers[:, None, None]


def _spread(numbers: Array, graphs: Array) -> Array:
    """Give each graph what is its problem's, (B, 1, 1)."""
    return numbers if len(numbers) == 1 else repeated(numbers, len(graphs) // len(numbers))

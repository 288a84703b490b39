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

from jgesr_lightning.graph.arrays import Array, of, positive_part
from jgesr_lightning.graph.gram import distances_from_gram
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.models import Models, Sums
from jgesr_lightning.solvers.solver import DIVERGED, Solver, State, over

_ABSURD = 1e4  # a step this many times longer than all the data together: the iteration is on its way to infinity
_MAX_DOUBLINGS = 100
_RESTART_EVERY = 200


@dataclass(frozen=True)
class PDCA(Solver):
    r"""The solver; see `Solver` for eps, max_iter and stop.

    Attributes:
        rho: inverse step (the first one, under backtracking).
        backtracking: double rho until s lies below its quadratic majorant at the new point, see `_majorised`. As the
            new point minimises majorant plus g, J does not rise, unless smoothing is as printed, since its step is not
            along the gradient of s. (The majorisation of f alone, with h convex, would imply this one; f is quartic in
            Psi and would ask for far shorter steps.) Else the step is fixed.
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
        problem, details = models.problem, self.backtracking or self.accelerated
        rho, theta = over(state.rho), over(_theta(state.inertia)) if self.accelerated else None
        # The two lines of Algorithm 1; extrapolated or not.
        psi = models.propose(problem.operator(state.W_ahead), 1 / rho, theta, details)
        graph = problem.prox_graph(state.W_ahead, state.D_ahead, rho, state.dual, careful=careful)

        new = self._moved(models, state, psi, graph)
        good = (psi.step / _ABSURD**2 <= models.size) & (new.value < math.inf)  # neither holds of what is not a number
        if details:
            D_step, ahead = distances_from_gram(psi.step_gram), state.inertia > 1
            if self.accelerated:
                good = good & (~ahead | (new.value <= state.value))
            if self.backtracking:
                good = good & (ahead | self._majorised(problem, state, new, psi, D_step))
            new = self._extrapolated(state, new, D_step) if self.accelerated else new
        return self._settled(models, state, new, graph, good)

    def _halvings(self, state: State) -> Array | float:
        """See `Solver`."""
        return state.rho / self.rho if self.backtracking else 1.0

    @staticmethod
    def _extrapolated(old: State, new: State, D_step: Array) -> State:
        """Return a state whose next step is taken from Psi + theta (Psi - Psi_before), and w likewise."""
        inertia = of(D_step).where(new.iterations % _RESTART_EVERY == 0, 1.0, _following(old.inertia))
        theta = over(_theta(inertia))
        # The parallelogram identity.
        D = (1 + theta) * new.D - theta * old.D + theta * (1 + theta) * D_step
        return new._replace(inertia=inertia, W_ahead=new.W + theta * (new.W - old.W), D_ahead=positive_part(D))

    @staticmethod
    def _majorised(problem: Problem, old: State, new: State, psi: Sums, D_step: Array) -> Array:
        r"""Whether s lies below its quadratic majorant; see `Problem.curvature`.

        .. math:: s(new) - s(old) - \langle \nabla s(old), new - old \rangle
                  \le \tfrac\rho2 (\|\Psi^+ - \Psi\|_F^2 + \|w^+ - w\|^2)
        """
        change = new.W - old.W
        curvature = problem.curvature(psi.step_squares or [], old.W, change, D_step, new.D - old.D)
        squares = (problem.unit * change * change).sum((-1, -2, -3)) / 2
        return curvature <= old.rho / 2 * (psi.step + squares)

    def _refused(self, state: State, which: Array) -> State:
        """Extrapolation starts again from nothing; a step is halved, or there is no going on."""
        xp, ahead = of(state.W), state.inertia > 1
        restarted, halved = which & ahead, which & ~ahead
        again = over(restarted)
        state = state._replace(
            W_ahead=xp.where(again, state.W, state.W_ahead), D_ahead=xp.where(again, state.D, state.D_ahead),
            inertia=xp.where(restarted, 1.0, state.inertia), restarts=state.restarts + restarted,
            reason=xp.where(halved & (state.backtracks >= _MAX_DOUBLINGS * self.backtracking), DIVERGED, state.reason)
        )  # fmt: skip
        if not self.backtracking:
            return state
        return state._replace(rho=xp.where(halved, 2 * state.rho, state.rho), backtracks=state.backtracks + halved)


def _following(inertia: Array) -> Array:
    return (1 + (1 + 4 * inertia * inertia) ** 0.5) / 2


def _theta(inertia: Array) -> Array:
    return (inertia - 1) / _following(inertia)

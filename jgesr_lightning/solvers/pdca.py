r"""Algorithm 1 of the paper: the proximal DC algorithm for the joint objective J over models and graph.

Linearising f and h of the split J = f + g - h (see `graph`) at the same point leaves the gradient of
:math:`s = f - h = \text{fidelity} + \alpha \langle w, d(\Psi) \rangle`, so that one step (`PDCA.step`) is

.. math:: \Psi^+ &= \Psi - \tfrac1\rho \big(\mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi\big) \\
          w^+ &= \mathrm{prox}_{g/\rho}\big(w - \tfrac\alpha\rho\, d(\Psi)\big)

with the old (Psi, w) on both right-hand sides. Start: Psi_0, and w_0 = max(0, cosine similarity of its rows).

`backtracking`: rho doubles until s lies below its quadratic majorant at the new point,
:math:`s(new) - s(old) - \langle \nabla s(old), new - old \rangle \le \frac\rho2 (\|\Delta\|_F^2 + \|w^+ - w\|^2)` (see
`Problem.curvature`). As the new point minimises majorant plus g, J does not rise. (The majorisation of f alone, with h
convex, would imply this one; f is quartic in Psi and would ask for far shorter steps.)

`accelerated`: the step is taken from Psi + theta (Psi - Psi_before), w likewise, with Nesterov's theta; one that raises
J is thrown away, and the extrapolation starts again from nothing. This is pDCAe (Wen, Chen, Pong 2018) with h, too,
linearised at the extrapolated point, so that f and h still cancel to s, and with its restart as a safeguard.

Several problems advance at once, each until its own rule stops it, and then stands still. On an accelerator a step
looks at nothing; whether all have stopped is looked at every `_LOOK` steps, and what stands still is the result.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from jgesr_lightning.graph.arrays import Array, all_of, blind, host, of, per_problem, positive_part, write_rows
from jgesr_lightning.graph.gram import distances_from_gram
from jgesr_lightning.graph.prox import QUIET, Prox
from jgesr_lightning.solvers.form import Sums
from jgesr_lightning.solvers.models import Models
from jgesr_lightning.solvers.state import (
    CARE,
    CONVERGED,
    DIVERGED,
    MAX_ITER,
    RUNNING,
    Solution,
    State,
    begun,
    chosen,
    resumed,
    solutions,
    spread,
    stopped_where_stationary,
)

_MAX_DOUBLINGS = 100
_RESTART_EVERY = 200
_LOOK = 10  # steps from one look at an accelerator's numbers to the next
_CHECK = 10  # steps from one check of stationarity to the next


@dataclass(frozen=True)
class PDCA:
    """The solver: `init`, `step` until all have a reason to stop, `result`; or `solve`, which does just that.

    Attributes:
        rho: inverse step (the first one, under backtracking).
        eps: what the stopping rule compares with.
        max_iter: stop after that many steps.
        backtracking: double rho until J cannot rise; else the step is fixed.
        accelerated: extrapolate, with restart.
        stop: "step": when ||Psi+ - Psi||_F < eps, as printed. "stationarity": when both of `Stationarity` are below
            eps, checked every ten steps.
        rounding: how much of its size J may rise by before it counts as having risen.
    """

    rho: float = 1.0
    eps: float = 1e-3
    max_iter: int = 500
    backtracking: bool = False
    accelerated: bool = False
    stop: str = "step"
    rounding: float = 1e-9

    def solve(self, models: Models) -> tuple[Solution, ...]:
        """Iterate; `models` holds the result afterwards. Return how each problem was solved.

        Raises:
            ValueError: what arrived is not finite.
        """
        begin = time.perf_counter()
        with QUIET():  # what is not finite is refused
            state, trips = self.init(models), 0
            while True:
                reasons = host(state.reason)
                if CARE in reasons:
                    state = self.step(models, resumed(state), careful=True)
                elif RUNNING in reasons:
                    for _ in range(_LOOK if blind(state.W) else 1):
                        state = self.step(models, state)
                        trips += 1
                        if self.stop == "stationarity" and trips % _CHECK == 0:
                            state = stopped_where_stationary(models, state, self.eps)
                else:
                    return solutions(models, state, self.rounding, time.perf_counter() - begin)

    def init(self, models: Models) -> State:
        """Return the start."""
        return begun(models, self.max_iter, self.rho)

    def step(self, models: Models, state: State, *, careful: bool = False) -> State:
        """Return the next iterates, or the same ones with shorter steps or a reason to stop."""
        problem = models.problem
        momentum, W, D = self._extrapolated(state)
        details = self.backtracking or self.accelerated
        # The two lines of Algorithm 1.
        proposed = models.propose(problem.operator(W), 1 / _each(state.rho), momentum, details=details)
        found = problem.prox_graph(W, D, spread(_each(state.rho), W), state.dual, careful=careful)
        return self._judged(models, state, momentum, proposed, found)

    def _extrapolated(self, state: State) -> tuple[Array | None, Array, Array]:
        """Return momentum, (B, 1, 1) or None, and W and D at Psi + momentum (Psi - Psi_before)."""
        if not self.accelerated:
            return None, state.W, state.D
        momentum = _each((state.inertia - 1) / _following(state.inertia))
        if not blind(momentum) and not momentum.any():
            return None, state.W, state.D
        many = spread(momentum, state.W)
        W = state.W + many * (state.W - state.W_before)
        # The parallelogram identity.
        D = (1 + many) * state.D - many * state.D_before + many * (1 + many) * state.D_step
        return momentum, W, positive_part(D)

    def _judged(self, models: Models, state: State, momentum: Array | None, proposed: Sums, found: Prox) -> State:
        """Return the state behind a proposed step: accepted, or refused."""
        problem, xp, running = models.problem, of(state.W), state.reason == RUNNING
        D, step = distances_from_gram(proposed.gram), proposed.step[0]
        value = problem.value(proposed.squares, D, found.W)
        good = (step <= state.bound) & (value < math.inf)  # neither holds of what is not a number
        extrapolated = running & False if momentum is None else momentum[:, 0, 0] > 0
        if momentum is not None:
            good = good & ((value <= state.value) | ~extrapolated)
        D_step = state.D_step if proposed.step_gram is None else distances_from_gram(proposed.step_gram)
        if self.backtracking and proposed.step_squares is not None:
            change = found.W - state.W
            curvature = problem.curvature(proposed.step_squares, state.W, change, D_step, D - state.D)
            squares = per_problem((problem.unit * change * change).sum((-1, -2)) / 2, len(step))
            good = good & ((curvature <= state.rho / 2 * (step + squares)) | extrapolated)
        solved = all_of(found.solved, len(step))
        accepted = running & good & solved
        iterations = state.iterations + 1
        write_rows(state.trace, iterations, value)
        step_norm = step**0.5
        inertia = state.inertia
        if self.accelerated:
            inertia = xp.where(iterations % _RESTART_EVERY == 0, 1.0, _following(state.inertia))
        reason = xp.where(iterations >= self.max_iter, MAX_ITER, RUNNING)
        if self.stop == "step":
            reason = xp.where(step_norm < self.eps, CONVERGED, reason)
        new = replace(
            state, W=found.W, D=D, W_before=state.W, D_before=state.D, D_step=D_step, dual=found.dual, inertia=inertia,
            value=value, step_norm=step_norm, reason=reason, iterations=iterations, tries=0 * state.tries,
            newton_steps=state.newton_steps + found.steps,
        )  # fmt: skip
        if not blind(step) and accepted.all():
            models.accept()
            return new
        # Refused: an extrapolation starts again from nothing; a step is halved, or there is no going on.
        halved = running & solved & ~good & ~extrapolated
        again = running & solved & ~good & extrapolated
        lost = halved & (state.tries >= _MAX_DOUBLINGS) if self.backtracking else halved
        refused = replace(
            state,
            inertia=xp.where(again, 1.0, state.inertia),
            restarts=state.restarts + again,
            rho=xp.where(halved, 2 * state.rho, state.rho) if self.backtracking else state.rho,
            backtracks=state.backtracks + (halved if self.backtracking else 0 * halved),
            tries=state.tries + halved,
            reason=xp.where(lost, DIVERGED, xp.where(running & ~(running & solved), CARE, state.reason)),
            newton_steps=new.newton_steps,
        )
        if blind(step) or accepted.any():
            models.accept(accepted)
            return chosen(accepted, new, refused)
        return refused


def _following(inertia: Array) -> Array:
    return (1 + (1 + 4 * inertia * inertia) ** 0.5) / 2


def _each(numbers: Array) -> Array:
    return numbers[:, None, None]

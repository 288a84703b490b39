r"""The proximal DC algorithm for the joint objective J over models and graph.

Linearising f and h of the split J = f + g - h (see `graph.objective`) at the same point leaves the gradient of
:math:`s = f - h = \text{fidelity} + \alpha \langle w, d(\Psi) \rangle`, so that one step is

.. math:: \Psi^+ &= \Psi - \tfrac1\rho \big(\mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi\big) \\
          w^+ &= \mathrm{prox}_{g/\rho}\big(w - \tfrac\alpha\rho\, d(\Psi)\big)

with the old (Psi, w) on both right-hand sides. Start: Psi_0, and w_0 = max(0, cosine similarity of its rows).

`step="backtracking"`: rho doubles until s lies below its quadratic majorant at the new point,

.. math:: \tfrac\mu2 \|M * \Delta\|_Z^2 + \alpha \langle w, d(\Delta) \rangle
          + \alpha \langle w^+ - w, d(\Psi^+) - d(\Psi) \rangle
          \;\le\; \tfrac\rho2 \big(\|\Delta\|_F^2 + \|w^+ - w\|^2\big), \qquad \Delta = \Psi^+ - \Psi,

whose left-hand side is s(new) - s(old) - <grad s(old), new - old> without its cancellations. As the new point minimises
majorant plus g, J does not rise. (The majorisation of f alone, with h convex, would imply this one; f is quartic in Psi
and would ask for far shorter steps.)

`accelerated=True`: the step is taken from Psi + theta (Psi - Psi_before), w likewise, with Nesterov's theta; one that
raises J is thrown away, and the extrapolation starts again from nothing. This is pDCAe (Wen, Chen, Pong 2018) with h,
too, linearised at the extrapolated point, so that f and h still cancel to s, and with its restart as a safeguard.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from jgesr_lightning.graph.prox import Array, prox_arrays
from jgesr_lightning.solvers.signals import Moments, Signals
from jgesr_lightning.solvers.solution import Penalties, Solution, rises

_ABSURD = 1e4  # a step this many times longer than all the data together: the iteration is on its way to infinity
_MAX_DOUBLINGS = 100
_RESTART_EVERY = 200


@dataclass(frozen=True)
class State:
    """One iterate, what is known of it, and what the next step starts from. G graphs: one, or one a layer."""

    W: Array
    distances: Array
    residual: float | None
    rho: float
    scale: float
    W_before: Array
    distances_before: Array
    step_distances: Array | None = None
    dual: Array | None = None
    inertia: float = 1.0
    iterations: int = 0
    step_norm: float = math.inf
    reason: str = ""
    objective: tuple[float, ...] = ()
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("newton_steps", "backtracks", "restarts"), 0))


@dataclass(frozen=True)
class PDCA:
    """The solver: `init`, `step` until a reason to stop, `result`; or `solve`, which does just that.

    Attributes:
        penalties: alpha, beta, gamma, mu.
        rho: inverse step (the first one, under backtracking).
        eps: stop when ||Psi+ - Psi||_F < eps.
        max_iter: stop after that many steps.
        backtracking: let rho grow until J cannot rise; else rho stays.
        accelerated: extrapolate, with restart.
        rounding: how much of its size J may rise by before it counts as having risen.
    """

    penalties: Penalties
    rho: float = 1.0
    eps: float = 1e-3
    max_iter: int = 500
    backtracking: bool = False
    accelerated: bool = False
    rounding: float = 1e-9

    def solve(self, signals: Signals, weights: Array) -> Solution:
        """Iterate until the step is shorter than eps or there is another reason to stop.

        Args:
            signals: the models; holds the solution afterwards.
            weights: diagonal of Z, (K,) positive: the same that `signals` measures its residual with.

        Raises:
            ValueError: what arrived is not finite.
        """
        begin = time.perf_counter()
        state = self.init(signals)
        while not state.reason:
            state = self.step(signals, state, weights)
        return replace(self.result(signals, state), seconds=time.perf_counter() - begin)

    def init(self, signals: Signals) -> State:
        """Return the start."""
        start = signals.start()
        W = np.maximum(start.cosines, 0)
        W.reshape(len(W), -1)[:, :: W.shape[-1] + 1] = 0
        residual = start.residual
        if residual is None and (
            self.backtracking or self.accelerated
        ):  # then steps give their own, not the last one's
            residual = signals.residual()
        state = State(W, start.distances, residual, self.rho, start.scale, W, start.distances)
        if residual is not None:
            state = replace(state, objective=(self.penalties.objective(residual, start.distances, W),))
        return state

    def step(self, signals: Signals, state: State, weights: Array) -> State:
        """Return the next iterate, or the same one with a reason to stop."""
        alpha, beta, gamma, mu = (getattr(self.penalties, name) for name in ("alpha", "beta", "gamma", "mu"))
        rho, inertia, counts = state.rho, state.inertia, dict(state.counts)
        objective = state.objective
        details = self.backtracking or self.accelerated
        for _ in range(_MAX_DOUBLINGS):
            ahead = (1 + math.sqrt(1 + 4 * inertia * inertia)) / 2
            momentum = (inertia - 1) / ahead if self.accelerated and state.step_distances is not None else 0.0
            W, distances = _extrapolated(state, momentum)
            pending = signals.propose(mu / rho * weights, (2 * alpha / rho) * _laplacian(W), momentum, details=details)
            new_W, dual, taken = prox_arrays(W - (alpha / rho) * distances, beta, gamma, rho, state.dual)
            moments = pending()
            counts["newton_steps"] += taken
            if len(objective) == state.iterations and moments.last_residual is not None:
                objective = (*objective, self.penalties.objective(moments.last_residual, state.distances, state.W))
            sound = _sound(moments, new_W, state.scale)
            value = None
            if sound and moments.residual is not None:
                value = self.penalties.objective(moments.residual, moments.distances, new_W)
            if momentum:
                assert value is not None or not sound
                if value is not None and value <= objective[-1]:
                    break
                inertia = 1.0
                counts["restarts"] += 1
            elif self.backtracking:
                if sound and self._majorised(state, moments, new_W, weights, rho):
                    break
                rho *= 2
                counts["backtracks"] += 1
            elif sound:
                break
            else:
                return replace(state, reason="diverged", objective=objective, counts=counts)
        else:
            return replace(state, reason="diverged", objective=objective, counts=counts)
        signals.accept()
        iterations, step_norm = state.iterations + 1, math.sqrt(moments.step_sq)
        reason = "converged" if step_norm < self.eps else "max_iter" if iterations >= self.max_iter else ""
        return State(
            W=new_W,
            distances=moments.distances,
            residual=moments.residual,
            rho=rho,
            scale=state.scale,
            W_before=state.W,
            distances_before=state.distances,
            step_distances=moments.step_distances,
            dual=dual,
            inertia=1.0 if iterations % _RESTART_EVERY == 0 else ahead,
            iterations=iterations,
            step_norm=step_norm,
            reason=reason,
            objective=objective if value is None else (*objective, value),
            counts=counts,
        )

    def _majorised(self, state: State, moments: Moments, W: Array, weights: Array, rho: float) -> bool:
        assert moments.step_distances is not None and moments.step_residual is not None
        change = W - state.W
        curvature = (
            self.penalties.mu * moments.step_residual
            + self.penalties.alpha * float(np.vdot(state.W, moments.step_distances))
            + self.penalties.alpha * float(np.vdot(change, moments.distances - state.distances))
        )
        return curvature <= rho * (moments.step_sq + float(np.vdot(change, change)) / 2)

    def result(self, signals: Signals, state: State) -> Solution:
        """Return the solution a state stands for."""
        objective = list(state.objective)
        if len(objective) == state.iterations:
            objective.append(self.penalties.objective(signals.residual(), state.distances, state.W))
        return Solution(
            graphs=state.W,
            iterations=state.iterations,
            reason=state.reason or "max_iter",
            step_norm=state.step_norm,
            objective=objective,
            rose=rises(objective, self.rounding),
            rho=state.rho,
            **state.counts,
        )


def _laplacian(W: Array) -> Array:
    result = -W
    result.reshape(len(W), -1)[:, :: W.shape[-1] + 1] = W.sum(-1)
    return result


def _extrapolated(state: State, momentum: float) -> tuple[Array, Array]:
    """Return W and D at Psi + momentum (Psi - Psi_before), the distances by the parallelogram identity."""
    if not momentum:
        return state.W, state.distances
    assert state.step_distances is not None
    W = state.W + momentum * (state.W - state.W_before)
    distances = (1 + momentum) * state.distances - momentum * state.distances_before
    return W, np.maximum(distances + momentum * (1 + momentum) * state.step_distances, 0)


def _sound(moments: Moments, W: Array, scale: float) -> bool:
    total = moments.step_sq + float(moments.distances.sum()) + float(W.sum())
    return math.isfinite(total) and math.sqrt(moments.step_sq) <= _ABSURD * scale

"""What a solve returns beside the models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from jgesr_lightning.graph.prox import Array


@dataclass(frozen=True)
class Penalties:
    """The constants of the joint objective J.

    Attributes:
        alpha: weight of the smoothness.
        beta: weight of the log barrier.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity.
    """

    alpha: float = 0.05
    beta: float = 1.0
    gamma: float = 1.0
    mu: float = 1.0

    def objective(self, residual: float, distances: Array, W: Array) -> float:
        """Return J from ||M * Psi - Xr||_Z^2, D(Psi) and W, summed over graphs; infinite where a client has no edge."""
        deg = W.sum(-1)
        barrier = -self.beta * float(np.log(deg).sum()) if deg.min() > 0 else math.inf
        edges = (self.alpha * float(np.vdot(W, distances)) + self.gamma * float(deg.sum())) / 2
        return self.mu / 2 * residual + edges + barrier


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
        rho: inverse step at the end.
        seconds: of the iterations alone.
        newton_steps: of all prox evaluations together.
        backtracks: steps refused because rho was too small.
        restarts: extrapolated steps refused because J would have risen.
    """

    graphs: Array
    iterations: int
    reason: str
    step_norm: float
    objective: list[float] = field(default_factory=list)
    rose: bool = False
    rho: float = math.nan
    seconds: float = 0.0
    newton_steps: int = 0
    backtracks: int = 0
    restarts: int = 0

    @property
    def converged(self) -> bool:
        """Whether the last step was shorter than eps."""
        return self.reason == "converged"


def rises(objective: list[float], tolerance: float) -> bool:
    """Whether a trace goes up anywhere by more than `tolerance` of its size."""
    return any(b > a + tolerance * max(1.0, abs(a)) for a, b in pairwise(objective))

"""What a solve returns beside the models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

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

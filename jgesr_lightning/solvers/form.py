"""What a solver is told of a step: a few sums over columns. How the models are held is behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from jgesr_lightning.graph.arrays import Array

Reduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over the processes that hold the other columns."""


class Sums(NamedTuple):
    """What one proposed step did, of B problems with G graphs each, N = B G, summed over columns.

    Attributes:
        squares: ``||M_i * (Psi+ - T_i)||_{Z_i}^2`` of each of the problem's pulls, (I, B).
        step: ||Psi+ - Psi||_F^2, (1, B).
        gram: Gram matrices of Psi+ less a row that all share, (N, K, K).
        step_squares, step_gram: both of Psi+ - Psi, where details were asked for.
    """

    squares: Array
    step: Array
    gram: Array
    step_squares: Array | None = None
    step_gram: Array | None = None


class Form(Protocol):
    """Some of the columns of the models Psi, (B, K, d): the current iterate, the one before, and a proposed one."""

    reduced: bool
    """Whether the sums are over all processes' columns already."""

    def begin(self) -> tuple[Tensor, Tensor, Tensor]:
        """Go to Psi_0. Return the Gram matrices of ``[Psi_0 - 1 r'; r]``, `Sums.squares` and ||Xr||_F^2, (1, B)."""

    def propose(self, S: Array, step: Array, momentum: Array | None, *, details: bool) -> Sums:
        """Compute Psi+ = Y - step (sum_i Z_i M_i * (Y - T_i) + S Y) at Y = Psi + momentum (Psi - Psi_before).

        `S` is (N, K, K); `step` and `momentum` are (B, 1, 1).
        """

    def filter(self, S: Array) -> Sums:
        """Compute Psi+, the minimiser of ``sum_i ||M_i * (Psi - T_i)||_{Z_i}^2 + tr(Psi' S Psi)``."""

    def accept(self, which: Array | None) -> None:
        """Make the proposed iterate the current one: of all problems, or of those of `which`, (B,) bool."""

    def gradient(self, S: Array) -> Array:
        """Return squared norms, (2 + I, B): of ``sum_i Z_i M_i * (Psi - T_i) + S Psi``, of S Psi, and of each pull."""

    def models(self, out: Tensor | None) -> Tensor:
        """Return all columns of Psi, or write these to their places in `out`, and return that; the last call."""

"""Some columns of the models during a solve, in whatever form they are held: what `Models` asks of both forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, of
from jgesr_lightning.graph.gram import work_dtype

Reduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over the processes that hold the other columns."""


class Part(ABC):
    """Some columns of Psi, of B problems with G graphs each, N = B G; iterates are less a row that all clients share.

    Attributes:
        psi, before, proposed: the current iterate, the one before (None where nobody wants it), and the next one.
        weights: Z_i of each of the problem's pulls, as a column.
        first: Gram matrices of ``[Psi_0 - 1 r'; r]``, (N, K + 1, K + 1), and the sum of ||T_i||_F^2, gaps filled, (B,).
    """

    psi: Any
    before: Any = None
    proposed: Any = None
    weights: list[Any]
    first: tuple[Array, Array]

    @abstractmethod
    def of_graph(self, matrices: Array) -> Any:
        """Return each iterate's own of (N, K, K)."""

    @abstractmethod
    def of_problem(self, numbers: Array) -> Any:
        """Return each iterate's own of (B, 1, 1)."""

    @abstractmethod
    def away(self, psi: Any) -> list[Any]:
        """Return ``M_i * (psi - T_i)`` for each pull; masks may be left to the weights."""

    @abstractmethod
    def masks(self) -> list[Any]:
        """Return M_i, or 1 where it is left to the weights."""

    @abstractmethod
    def solve(self, S: Array, inverse: Array) -> Any:
        """Return the minimiser of ``sum_i ||M_i * (Psi - T_i)||_{Z_i}^2 + tr(Psi' S Psi)``.

        `S` and `inverse` of ``sum_i Z_i + S`` are (N, K, K).
        """

    @abstractmethod
    def gram(self, psi: Any) -> Array:
        """Return Gram matrices of the rows, less their mean or not, (N, K, K)."""

    @abstractmethod
    def squares(self, psi: Any, weights: Any = 1.0) -> Array:
        """Return ||psi||_Z^2, (B,)."""

    @abstractmethod
    def models(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield which columns, and Psi in them; the last call."""

    def accept(self, which: Array | None) -> None:
        """Make the proposed iterate the current one: of all problems, or of those of `which`, (B,) bool."""
        before, psi, self.proposed = self.psi, self.proposed, None
        if which is not None:
            chosen, where = self.of_problem(which[:, None, None]) > 0, of(psi).where
            before = before if self.before is None else where(chosen, before, self.before)
            psi = where(chosen, psi, self.psi)
        self.before, self.psi = before, psi


def dtype_of(models: Tensor) -> torch.dtype:
    """Return the type models are computed in; on an accelerator float64, as float32's products may be TF32 there."""
    return work_dtype(models) if models.device.type == "cpu" else torch.float64

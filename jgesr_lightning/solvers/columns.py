"""Some columns of the models as they are, K x c: one pass over d a step.

A step reads Psi and X_r once and writes the new Psi once, some columns at a time, and takes while they are in the cache
the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity; nothing is of size
K x K x d. Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it
would cost the digits of what the clients' models differ by. X_r is held likewise, and is not a number where nothing
arrived: operations with a mask of bools take eight times as long as others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, leave, of
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import fill_gaps, self_product, work_dtype
from jgesr_lightning.graph.problem import Problem

COPIES = 2  # of its columns, that a step keeps in the cache


class Columns:
    """Columns of one layer, few enough for the cache, of B problems with G graphs each, N = B G.

    Args:
        problem: with pulls of shape (B, K, d).
        layer: which of the G graphs, and G.
        columns: which of all columns.
        start: Psi_0, (B, K, d), or None to start from the first pull's target.
        previous: (B, K, d) models that fill the gaps, or None; see `fill_gaps`.
        room: memory for two iterates and each pull's target, (B, K, c), and for what a step needs meanwhile, a change
            and each pull's `away`, which others may share: what is allocated anew each time has to be paged in.

    Attributes:
        psi, before, proposed: the current iterate, the one before it (None where nobody wants it), and the next one.
        spare: memory for a change, or None.
        weights: Z_i of each of the problem's pulls, as a column.
        first: Gram matrices of ``[Psi_0 - 1 r'; r]``, (N, K + 1, K + 1), and the sum of ||T_i||_F^2, gaps filled, (B,).
    """

    psi: Any
    before: Any = None
    proposed: Any = None
    spare: Any = None
    weights: list[Any]
    first: tuple[Array, Array]

    def __init__(
        self, problem: Problem, layer: tuple[int, int], columns: slice | Tensor,
        start: Tensor | None, previous: Tensor | None, room: list[Tensor],
    ) -> None:  # fmt: skip
        self._dtype, self._columns, self._layer = dtype_of(problem.pulls[0].target), columns, layer
        self.weights = [pull.weights[:, None].to(self._dtype) for pull in problem.pulls]
        older = previous if start is None else start
        older = None if older is None else older[..., columns]
        pulls, norms = len(problem.pulls), problem.pulls[0].weights.new_zeros(())
        self._room, self._targets = room[:2], room[2 : pulls + 2]
        self.spare, *self._away = room[pulls + 2 :]
        for pull, room_of_target in zip(problem.pulls, self._targets, strict=True):
            target = pull.target[..., columns].to(self._dtype)
            if pull.mask is not None:
                target = fill_gaps(target, pull.mask[..., columns], pull.weights, older)
            norms = norms + room_of_target.copy_(target).double().square().sum((-1, -2))
        psi = self._targets[0] if start is None else start[..., columns].to(self._dtype)
        self._shared = psi.mean(-2, keepdim=True)
        self.psi = torch.sub(psi, self._shared, out=self._room[0])
        for pull, target in zip(problem.pulls, self._targets, strict=True):
            target -= self._shared
            if pull.mask is not None:
                target.masked_fill_(~pull.mask[..., columns], torch.nan)
        self.first = self.gram(torch.cat([self.psi, self._shared], -2)), enter(norms)

    def own(self, numbers: Array) -> Array:
        """Return each iterate's own of (N, ...), one a graph."""
        return numbers[self._layer[0] :: self._layer[1]]

    def cast(self, numbers: Array) -> Any:
        """Return K x K numbers in the type of the iterates."""
        return leave(numbers).to(self._dtype)

    def away(self, psi: Any) -> list[Any]:
        """Return ``M_i * (psi - T_i)`` for each pull, until the next call; masks may be left to the weights."""
        pairs = zip(self._targets, self._away, strict=True)
        return [torch.nan_to_num_(torch.sub(psi, target, out=room)) for target, room in pairs]

    def masks(self) -> list[Any]:
        """Return M_i, or 1 where it is left to the weights."""
        return [torch.nan_to_num_(target - target + 1) for target in self._targets]

    def gram(self, psi: Any) -> Array:
        """Return Gram matrices of the rows, less their mean or not, (N, K, K)."""
        own, (layer, layers) = self_product(psi), self._layer
        if layers == 1:
            return enter(own)
        grams = own.new_zeros(len(own), layers, *own.shape[1:])
        grams[:, layer] = own
        return enter(grams.flatten(0, 1))

    def squares(self, psi: Any, weights: Any = 1.0) -> Array:
        """Return ||psi||_Z^2, (B,); sums over a row are in the type of `psi`."""
        total = (weights * torch.linalg.vector_norm(psi, dim=-1, keepdim=True).double().square_()).sum((-1, -2))
        if psi.dtype == torch.float32 and not bool(total.isfinite().all()):  # squares beyond its range
            norms = torch.linalg.vector_norm(psi, dim=-1, keepdim=True, dtype=torch.float64)
            total = (weights * norms.square_()).sum((-1, -2))
        return enter(total)

    def solve(self, S: Array, inverse: Array) -> Any:
        """Return the minimiser of ``sum_i ||M_i * (Psi - T_i)||_{Z_i}^2 + tr(Psi' S Psi)``, see `solve_columns`.

        `S` and `inverse` of ``sum_i Z_i + S`` are (N, K, K).
        """
        psi, pulls = leave(self.psi).double(), zip(self.weights, self.masks(), self.away(0 * self.psi), strict=True)
        terms = [(leave(weight * mask) + 0 * psi, leave(-weight * away) + 0 * psi) for weight, mask, away in pulls]
        z, right = (torch.stack(each).sum(0) for each in zip(*terms, strict=True))
        own = leave(self.own(S)), leave(self.own(inverse))
        return self.cast(enter(solve_columns(*own, z, right, psi)))

    def propose(self, base: Any, change: Any) -> None:
        """Propose ``base - change``; the iterate before, if it is still there, may make room."""
        self.proposed = torch.sub(base, change, out=self._room[1 if self.psi is self._room[0] else 0])

    def accept(self, which: Array | None) -> None:
        """Make the proposed iterate the current one: of all problems, or of those of `which`, (N,) bool."""
        before, psi, self.proposed = self.psi, self.proposed, None
        if which is not None:
            chosen, where = self.cast(self.own(which[:, None, None])) > 0, of(psi).where
            before = where(chosen, before, before if self.before is None else self.before)
            psi = where(chosen, psi, self.psi)
        self.before, self.psi = before, psi

    def release(self) -> None:
        """Let go of all but the current iterate; `models` alone is called then."""
        self.before = self.proposed = self.spare = None
        self._room, self._targets, self._away = [], [], []

    def models(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield which columns, and Psi in them."""
        yield self._columns, self.psi + self._shared


def dtype_of(models: Tensor) -> torch.dtype:
    """Return the type models are computed in; on an accelerator float64, as float32's products may be TF32 there."""
    return work_dtype(models) if models.device.type == "cpu" else torch.float64

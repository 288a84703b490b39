"""Some columns of the models as they are, K x c: one pass over d a step.

A step reads Psi and X_r once and writes the new Psi once, some columns at a time, and takes while they are in the cache
the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity; nothing is of size
K x K x d. Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it
would cost the digits of what the clients' models differ by. X_r is held likewise, and is infinite where nothing
arrived: operations with a mask of bools take eight times as long as others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, leave, of
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import BLOCK, TINY, fill_gaps, self_product, work_dtype
from jgesr_lightning.graph.problem import Problem

COPIES = 4  # of its columns that a step works on: two iterates, what arrived, and how far it is


class Columns:
    """Columns of one layer, few enough for the cache, of B problems with G graphs each.

    Args:
        problem: with pulls of shape (B, K, d).
        layer: which of the G graphs, and G.
        columns: which of all columns.
        start: Psi_0, (B, K, d), or None to start from the first pull's target.
        previous: (B, K, d) models that fill the gaps, or None; see `fill_gaps`.
        room: memory for two iterates and each pull's target, (B, K, c), and for what a step needs meanwhile, a pull's
            `away`, which others may share: what is allocated anew each time has to be paged in.

    Attributes:
        layer: which of the G graphs, and G; None for columns of all.
        accuracy: type that squares and products are summed in over a row, until they meet those of other columns.
        psi, before, proposed: the current iterate, the one before it (None where nobody wants it), and the next one.
        weights: Z_i of each of the problem's pulls, as a column.
        first: for `total`: products of ``[Psi_0 - 1 r'; r]`` and what the sum of ||T_i||_F^2 is made of, gaps filled.
    """

    psi: Any
    layer: Any = None
    before: Any = None
    proposed: Any = None
    weights: list[Any]
    first: tuple[Any, Any]

    def __init__(
        self, problem: Problem, layer: tuple[int, int], columns: slice | Tensor,
        start: Tensor | None, previous: Tensor | None, room: list[Tensor],
    ) -> None:  # fmt: skip
        self.accuracy = self._dtype = dtype_of(problem.pulls[0].target)
        self._columns, self.layer = columns, layer
        self.weights = [pull.weights[:, None].to(self._dtype) for pull in problem.pulls]
        older = previous if start is None else start
        older = None if older is None else older.squeeze(0)[..., columns]
        pulls, norms = len(problem.pulls), problem.pulls[0].weights.new_zeros(())
        self._room, self._targets, self._away = room[:2], room[2 : pulls + 2], room[-1]
        for pull, room_of_target in zip(problem.pulls, self._targets, strict=True):
            target = pull.target.squeeze(0)[..., columns].to(self._dtype)
            if pull.mask is not None:
                target = fill_gaps(target, pull.mask.squeeze(0)[..., columns], pull.weights, older)
            norms = norms + room_of_target.copy_(target).double().square().sum(-1, keepdim=True)
        psi = self._targets[0] if start is None else start.squeeze(0)[..., columns].to(self._dtype)
        self._shared = psi.mean(-2, keepdim=True)
        self.psi = torch.sub(psi, self._shared, out=self._room[0])
        for pull, target in zip(problem.pulls, self._targets, strict=True):
            target -= self._shared
            if pull.mask is not None:
                target.masked_fill_(~pull.mask.squeeze(0)[..., columns], torch.inf)
        self.first = self_product(torch.cat([self.psi, self._shared], -2)), (1.0, norms.sqrt())

    def own(self, numbers: Array) -> Array:
        """Return each iterate's own of (B, G, ...), or of (B, 1, ...)."""
        own = numbers[:, self.layer[0] % numbers.shape[1]]
        return own if len(own) > 1 else own[0]

    def cast(self, numbers: Array) -> Any:
        """Return K x K numbers in the type of the iterates."""
        return leave(numbers).to(self._dtype)

    def away(self, psi: Any) -> Iterable[Any]:
        """Yield ``M_i * (psi - T_i)`` for each pull, until the next is asked for; masks may be left to the weights."""
        smallest = torch.finfo(self._dtype).min
        return (torch.threshold_(torch.sub(psi, target, out=self._away), smallest, 0.0) for target in self._targets)

    def masks(self) -> list[Any]:
        """Return M_i, or 1 where it is left to the weights."""
        return [torch.nan_to_num_(target - target + 1) for target in self._targets]

    def gram(self, psi: Any) -> Any:
        """Return the products of the rows, less their mean or not, for `total`."""
        if self.accuracy == torch.float32 and psi.shape[-1] <= BLOCK:
            return psi @ psi.mT
        return self_product(psi.to(self.accuracy))

    def squares(self, psi: Any, weights: Any = 1.0) -> Any:
        """Return what ||psi||_Z^2 is summed from, for `total`; sums over a row are in `accuracy`."""
        return weights, torch.linalg.vector_norm(psi, dim=-1, keepdim=True, dtype=self.accuracy)

    def total(self, measured: list[list[Any]]) -> list[Array] | None:
        """Return the sums, (B,) and (B, G, K, K), of what columns of this form and layer measured one after another.

        None where single precision cannot hold them. Summed for each alone, they would take a fifth of a step.
        """
        sums, (layer, layers) = [], self.layer
        for each in zip(*measured, strict=True):
            if isinstance(each[0], tuple):
                raw, least = torch.stack([norms for _, norms in each]), -1.0
                own = held = (each[0][0] * raw.double().square_()).sum((0, -1, -2)).reshape(-1)
            else:
                raw, least = torch.stack(each).sum(0), TINY
                own = raw.double().reshape(-1, 1, *raw.shape[-2:])
                held = own.diagonal(dim1=-2, dim2=-1)
                own = torch.nn.functional.pad(own, (0, 0, 0, 0, layer, layers - 1 - layer))
            if raw.dtype == torch.float32 and not (float(held.min()) > least and float(held.max()) < torch.inf):
                return None
            sums.append(enter(own))
        return sums

    def solve(self, S: Array, inverse: Array) -> Any:
        """Return the minimiser of ``sum_i ||M_i * (Psi - T_i)||_{Z_i}^2 + tr(Psi' S Psi)``, see `solve_columns`.

        `S` and `inverse` of ``sum_i Z_i + S`` are (B, G, K, K).
        """
        psi = leave(self.psi).double()
        z, right = torch.zeros_like(psi), torch.zeros_like(psi)
        for weight, mask, away in zip(self.weights, self.masks(), self.away(0 * self.psi), strict=True):
            z += leave(weight * mask)
            right -= leave(weight * away)
        return self.cast(enter(solve_columns(leave(self.own(S)), leave(self.own(inverse)), z, right, psi)))

    def room(self) -> Any:
        """Return memory for the next iterate, perhaps that of the one before it; or None."""
        return self._room[1 if self.psi is self._room[0] else 0]

    def propose(self, base: Any, change: Any) -> None:
        """Propose ``base - change``, written to `room`."""
        self.proposed = torch.sub(base, change, out=self.room())

    def accept(self, which: Array | None) -> None:
        """Make the proposed iterate the current one: of all problems, or of those of `which`, (B,) bool."""
        before, psi, self.proposed = self.psi, self.proposed, None
        if which is not None:
            chosen, where = self.cast(which.reshape(-1, *[1] * (psi.ndim - 1))) > 0, of(psi).where
            before = where(chosen, before, before if self.before is None else self.before)
            psi = where(chosen, psi, self.psi)
        self.before, self.psi = before, psi

    def release(self) -> None:
        """Let go of all but the current iterate; `write` alone is called then."""
        self.before = self.proposed = None
        self._room, self._targets, self._away = [], [], torch.empty(0)

    def write(self, out: Tensor) -> None:
        """Write Psi to its columns of `out`, (B, K, d)."""
        out[..., self._columns] = (self.psi + self._shared).to(out.dtype)


def dtype_of(models: Tensor) -> torch.dtype:
    """Return the type models are computed in; on an accelerator float64, as float32's products may be TF32 there."""
    return work_dtype(models) if models.device.type == "cpu" else torch.float64

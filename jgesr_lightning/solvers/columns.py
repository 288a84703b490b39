"""The models as K x d columns: one fused pass over d a step.

A step reads Psi, X_r and M once and writes the new Psi once, chunk by chunk, and takes from each chunk while it is in
the cache the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity. A refused or
non-finite step leaves the last iterate untouched; there is nothing of size K x K x d, and the mask stays bool. Psi is
held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it would cost the
digits of what the clients' models differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, hidden, leave
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import chunks, fill_gaps, self_product, work_dtype
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.form import Sums

T = TypeVar("T", Tensor, None, Tensor | None)


class Columns:
    """A `Form`.

    Args:
        problem: with pulls of shape (B, K, d).
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        start: Psi_0, (B, K, d), or None to start from the first pull's target.
        previous: (B, K, d) models that fill the gaps, or None; see `fill_gaps`.
        places: which of all columns these are, to be copied; None: they are all.
    """

    reduced = False

    def __init__(
        self,
        problem: Problem,
        layers: Sequence[int],
        start: Tensor | None,
        previous: Tensor | None = None,
        places: Tensor | None = None,
    ) -> None:
        self._problem, self._layers, self._places = problem, layers, places
        self._start, self._previous = _some(start, places), _some(previous, places)
        self._pulls = [replace(p, target=_some(p.target, places), mask=_some(p.mask, places)) for p in problem.pulls]
        first = self._pulls[0].target
        self._problems, self._clients, size = first.shape
        self._dtype, self._device = work_dtype(first), first.device
        # The products of float32 may be rounded to ten bits on an accelerator (TF32).
        self._arithmetic = self._dtype if self._device.type == "cpu" else torch.float64
        self._shared = torch.empty(self._problems, 1, size, dtype=self._dtype, device=self._device)
        self._current = torch.empty(first.shape, dtype=self._dtype, device=self._device)
        # The iterate before is overwritten by a proposal, unless some problems may refuse it.
        self._keeps = self._problems > 1 or hidden(self._current)
        self._before = torch.zeros_like(self._current)
        self._next = torch.zeros_like(self._current) if self._keeps else self._before
        self._weights = [pull.weights.to(self._arithmetic)[:, None] for pull in self._pulls]

    def begin(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Form`."""
        first, size = self._pulls[0], self._clients + 1
        gram = self._zeros(self._problems, len(self._layers), size, size)
        norms, sound = self._zeros(self._problems), torch.ones((), dtype=torch.bool, device=self._device)
        for layer, columns in self._chunks():
            mask = first.mask
            part = received = first.target[..., columns].to(self._dtype)
            if mask is not None:
                mask = mask[..., columns]
                received = torch.where(mask, part, 0)
                sound &= torch.isfinite(torch.where(mask, 0, part)).all()
            if self._start is not None:
                part = self._start[..., columns].to(self._dtype)
            elif mask is not None:
                part = fill_gaps(part, mask, first.weights, _some(self._previous, columns))
            self._shared[..., columns] = shared = part.mean(-2, keepdim=True)
            self._current[..., columns] = part - shared
            gram[:, layer] += self_product(torch.cat([part - shared, shared], -2).double())
            norms += received.double().square().sum((-1, -2))
        if first.mask is not None and (hidden(sound) or not bool(sound)):
            # Not finite times zero is not zero: such noise has to go before a mask can be multiplied by.
            self._pulls[0] = replace(first, target=torch.where(first.mask, first.target, 0))
        if self._places is not None:  # copies, not needed any more
            self._start = self._previous = None
        squares = self._zeros(len(self._pulls), self._problems)
        for _, columns in self._chunks():
            self._add(squares, self._away(self._current[..., columns].to(self._arithmetic), columns)[0])
        return gram.flatten(0, 1), squares, norms[None]

    def propose(self, S: Array, step: Array, momentum: Array | None, *, details: bool) -> Sums:
        """See `Form`."""
        size = leave(step).to(self._arithmetic)
        across = (self._by_layer(leave(S)) * leave(step)[..., None]).to(self._arithmetic)
        scaled = [weight * size for weight in self._weights]
        ahead = None if momentum is None else leave(momentum).to(self._arithmetic)
        sums = self._no_sums(details)
        for layer, columns in self._chunks():
            psi = base = self._current[..., columns].to(self._arithmetic)
            if ahead is not None:
                base = psi + ahead * (psi - self._before[..., columns])
            away, masks = self._away(base, columns)
            change = self._problem.gradient_models(base, across[:, layer], scaled, away)
            out = self._next[..., columns] if self._arithmetic == self._dtype else None
            new = torch.sub(base, change, out=out)
            for difference, mask in zip(away, masks, strict=True):  # from Y to Psi+
                difference.sub_(change) if mask is None else difference.addcmul_(mask, change, value=-1)
            self._note(sums, layer, columns, new, away, change if ahead is None else new - psi, masks)
        return Sums(*(None if part is None else enter(part) for part in sums))

    def filter(self, S: Array) -> Sums:
        """See `Form`; exact in every column, see `solve_columns`."""
        across, sums = self._by_layer(leave(S)), self._no_sums(details=False)
        weights = [pull.weights[:, None] for pull in self._pulls]
        inverse = torch.linalg.inv(torch.diag_embed(torch.stack(weights).sum(0)[:, 0]) + across)
        for layer, columns in self._chunks(8):
            old = self._current[..., columns].double()
            away, masks = self._away(torch.zeros_like(old), columns)  # less the targets, zero in the gaps
            right = torch.stack([-weight * part for weight, part in zip(weights, away, strict=True)]).sum(0)
            z = [
                weight * (torch.ones_like(old) if mask is None else mask)
                for weight, mask in zip(weights, masks, strict=True)
            ]
            new = solve_columns(across[:, layer], inverse[:, layer], torch.stack(z).sum(0), right, old)
            self._next[..., columns] = new
            self._note(sums, layer, columns, new, self._away(new, columns)[0], new - old, masks)
        return Sums(*(None if part is None else enter(part) for part in sums))

    def _no_sums(self, details: bool) -> Sums:
        pulls, grams = (len(self._pulls), self._problems), (self._problems * len(self._layers), *[self._clients] * 2)
        shapes = [pulls, (1, self._problems), grams, *([pulls, grams] if details else [])]
        return Sums(*(self._zeros(*shape) for shape in shapes))

    def _note(
        self, sums: Sums, layer: int, columns: slice, new: Tensor, away: list[Tensor], step: Tensor, masks: list[Any]
    ) -> None:
        """Write the proposed columns, if that has not been done, and add what they come to."""
        if self._arithmetic != self._dtype:
            self._next[..., columns] = new
        self._by_layer(sums.gram)[:, layer] += self_product(new)
        self._add(sums.squares, away)
        sums.step[0] += _squares(step)
        if sums.step_gram is not None and sums.step_squares is not None:
            self._by_layer(sums.step_gram)[:, layer] += self_product(step)
            self._add(sums.step_squares, [step if mask is None else step * mask for mask in masks])

    def _add(self, totals: Tensor, away: list[Tensor]) -> None:
        for total, weight, difference in zip(totals, self._weights, away, strict=True):
            total += _squares(difference, weight)

    def _away(self, psi: Tensor, columns: slice) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return M_i * (psi - T_i), psi less the shared row, and M_i, widened: bools multiply slowly."""
        shared = self._shared[..., columns].to(psi.dtype)
        masks = [None if pull.mask is None else pull.mask[..., columns].to(psi.dtype) for pull in self._pulls]
        away = [psi - (pull.target[..., columns].to(psi.dtype) - shared) for pull in self._pulls]
        return [a if mask is None else a.mul_(mask) for a, mask in zip(away, masks, strict=True)], masks

    def accept(self, which: Array | None) -> None:
        """See `Form`."""
        if which is None:
            spare = self._before if self._keeps else self._current
            self._before, self._current, self._next = self._current, self._next, spare
        else:
            chosen = leave(which)[:, None, None]
            torch.where(chosen, self._current, self._before, out=self._before)
            torch.where(chosen, self._next, self._current, out=self._current)

    def gradient(self, S: Array) -> Array:
        """See `Form`; one more pass."""
        across = self._by_layer(leave(S)).to(self._arithmetic)
        total = self._zeros(2 + len(self._pulls), self._problems)
        for layer, columns in self._chunks():
            psi = self._current[..., columns].to(self._arithmetic)
            pulled = [w * a for w, a in zip(self._weights, self._away(psi, columns)[0], strict=True)]
            parts = [across[:, layer] @ psi, *pulled]
            for row, part in zip(total, [torch.stack(parts).sum(0), *parts], strict=True):
                row += _squares(part)
        return enter(total)

    def models(self, out: Tensor | None) -> Tensor:
        """See `Form`."""
        del self._before, self._next
        self._current += self._shared
        models = self._current.to(self._pulls[0].target.dtype)
        return models if out is None or self._places is None else out.index_copy_(2, self._places, models)

    def _by_layer(self, matrices: Tensor) -> Tensor:
        return matrices.view(self._problems, -1, self._clients, self._clients)

    def _chunks(self, copies: int = 3) -> Iterator[tuple[int, slice]]:
        return chunks(self._layers, copies * self._clients * self._problems, self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _squares(part: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``||part||_Z^2``, (B,) float64, Z = diag(weights) (K, 1); sums over a row are in the type of `part`."""
    squares = torch.linalg.vecdot(part, part).double()
    total: Tensor = squares.sum(-1) if weights is None else squares @ weights[:, 0].double()
    if part.dtype == torch.float32 and not bool(total.isfinite().all()) and bool(part.isfinite().all()):
        return _squares(part.double(), weights)  # beyond its range
    return total


def _some(tensor: T, columns: Tensor | slice | None) -> T:
    return tensor if tensor is None or columns is None else tensor[..., columns]

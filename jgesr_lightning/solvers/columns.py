"""The models as K x d columns: one fused pass over d a step.

A step reads Psi, X_r and M once and writes the new Psi once, chunk by chunk, and takes from each chunk while it is in
the cache the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity. Two buffers of
the size of the models alternate, so that a refused or non-finite step leaves the last one untouched; there is nothing
of size K x K x d, and the mask stays bool.

Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it would cost
the digits of what the clients' models differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, hidden, leave
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import self_product
from jgesr_lightning.graph.passes import chunks, fill_gaps, work_dtype
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
        self._pulls, self._start, self._previous = problem.pulls, start, previous
        if places is not None:
            self._pulls = tuple(
                replace(p, target=_some(p.target, places), mask=_some(p.mask, places)) for p in self._pulls
            )
            self._start, self._previous = _some(start, places), _some(previous, places)
        self._problem, self._layers, self._places = problem, layers, places
        first = self._pulls[0].target
        self._problems, self._clients, size = first.shape
        self._dtype, self._device = work_dtype(first), first.device
        self._arithmetic = self._dtype if self._device.type == "cpu" else torch.float64
        self._shared = torch.empty(self._problems, 1, size, dtype=self._dtype, device=self._device)
        self._current = torch.empty(first.shape, dtype=self._dtype, device=self._device)
        # The iterate before is overwritten by a proposal, unless some problems may refuse it.
        self._before = torch.empty_like(self._current)
        self._keeps = self._problems > 1 or hidden(self._current)
        self._next = torch.zeros_like(self._current) if self._keeps else self._before
        self._weights = [pull.weights.to(self._arithmetic)[:, None] for pull in self._pulls]

    def begin(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Form`."""
        first, clients, problems = self._pulls[0], self._clients, self._problems
        gram = self._zeros(problems, len(self._layers), clients + 1, clients + 1)
        norms, sound = self._zeros(problems), torch.ones((), dtype=torch.bool, device=self._device)
        for layer, columns in chunks(self._layers, 3 * clients * problems, self._device):
            part = received = first.target[..., columns].to(self._dtype)
            if first.mask is not None:
                mask = first.mask[..., columns]
                received = torch.where(mask, part, 0)
                sound &= torch.isfinite(torch.where(mask, 0, part)).all()
            if self._start is not None:
                part = self._start[..., columns].to(self._dtype)
            elif first.mask is not None:
                part = fill_gaps(
                    part, mask, first.weights, None if self._previous is None else self._previous[..., columns]
                )
            shared = part.mean(-2, keepdim=True)
            self._shared[..., columns] = shared
            self._current[..., columns] = part - shared
            gram[:, layer] += self_product(torch.cat([part - shared, shared], -2).to(torch.float64))
            norms += received.to(torch.float64).square().sum((-1, -2))
        if first.mask is not None and (hidden(sound) or not bool(sound)):
            # Not finite times zero is not zero: such noise has to go before a mask can be multiplied by.
            self._pulls = (replace(first, target=torch.where(first.mask, first.target, 0)), *self._pulls[1:])
        if self._places is not None:  # copies, not needed any more
            self._start = self._previous = None
        squares = self._zeros(len(self._pulls), problems)
        for _, columns in self._chunks():
            psi = self._current[..., columns].to(self._arithmetic)
            self._add_squares(squares, self._away(psi, columns)[0])
        return gram.flatten(0, 1), squares, norms[None]

    def propose(self, S: Array, step: Array, momentum: Array | None, *, details: bool) -> Sums:
        """See `Form`."""
        across = leave(S).view(self._problems, -1, self._clients, self._clients)
        across = (across * leave(step)[..., None]).to(self._arithmetic)
        size = leave(step).to(self._arithmetic)
        ahead = None if momentum is None else leave(momentum).to(self._arithmetic)
        scaled = [weight * size for weight in self._weights]
        sums = self._empty_sums(details)
        for layer, columns in self._chunks():
            psi = base = self._current[..., columns].to(self._arithmetic)
            if ahead is not None:
                base = psi + ahead * (psi - self._before[..., columns])
            away, masks = self._away(base, columns)
            change = self._problem.gradient_models(base, across[:, layer], scaled, away)
            new = torch.sub(base, change, out=self._target(columns))
            for difference, mask in zip(away, masks, strict=True):  # from Y to Psi+
                difference.sub_(change) if mask is None else difference.addcmul_(mask, change, value=-1)
            step = change if ahead is None else new - psi
            self._note(sums, layer, columns, new, away, step, masks)
        return Sums(*(None if part is None else enter(part) for part in sums))

    def filter(self, S: Array) -> Sums:
        """See `Form`; exact in every column, see `solve_columns`."""
        across = leave(S).view(self._problems, -1, self._clients, self._clients)
        z = self._pulls[0].weights[:, None]
        always = sum((pull.weights for pull in self._pulls[1:]), torch.zeros_like(z[:, 0]))[:, None]
        inverse = torch.linalg.inv(torch.diag_embed((z + always)[:, 0]) + across)
        sums = self._empty_sums(details=False)
        for layer, columns in chunks(self._layers, 8 * self._clients * self._problems, self._device):
            old = self._current[..., columns].to(torch.float64)
            away, masks = self._away(torch.zeros_like(old), columns)  # less the targets, zero in the gaps
            pulled = [-pull.weights[:, None] * part for pull, part in zip(self._pulls, away, strict=True)]
            right = torch.stack(pulled).sum(0)
            mask = self._pulls[0].mask
            arrived = torch.ones_like(old, dtype=torch.bool) if mask is None else mask[..., columns]
            new = solve_columns(across[:, layer], inverse[:, layer], z, arrived, right, old, always=always)
            self._next[..., columns] = new
            away, masks = self._away(new, columns)
            self._note(sums, layer, columns, new, away, new - old, masks)
        return Sums(*(None if part is None else enter(part) for part in sums))

    def _empty_sums(self, details: bool) -> Sums:
        clients, graphs, pulls = self._clients, self._problems * len(self._layers), len(self._pulls)
        each = [(pulls, self._problems), (1, self._problems), (graphs, clients, clients)]
        shapes = [*each, each[0], each[2]] if details else each
        return Sums(*(self._zeros(*shape) for shape in shapes))

    def _note(
        self,
        sums: Sums,
        layer: int,
        columns: slice,
        new: Tensor,
        away: list[Tensor],
        step: Tensor,
        masks: list[Tensor | None],
    ) -> None:
        """Write the proposed columns, if that has not been done, and add what they come to."""
        if new.dtype != self._dtype:
            self._next[..., columns] = new
        self._gram_of(sums.gram)[:, layer] += self_product(new)
        self._add_squares(sums.squares, away)
        sums.step[0] += _squares(step)
        if sums.step_gram is not None and sums.step_squares is not None:
            self._gram_of(sums.step_gram)[:, layer] += self_product(step)
            self._add_squares(sums.step_squares, [step if mask is None else step * mask for mask in masks])

    def _gram_of(self, grams: Tensor) -> Tensor:
        return grams.view(self._problems, -1, self._clients, self._clients)

    def _target(self, columns: slice) -> Tensor | None:
        """Return where to write proposed columns, if they are computed in the type they are kept in."""
        return self._next[..., columns] if self._arithmetic == self._dtype else None

    def _add_squares(self, totals: Tensor, away: list[Tensor]) -> None:
        for total, weight, difference in zip(totals, self._weights, away, strict=True):
            total += _squares(difference, weight)

    def _away(self, psi: Tensor, columns: slice) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return M_i * (psi - T_i) of each pull, psi being less the shared row; and M_i, widened.

        To multiply by bools takes several times longer.
        """
        shared, away = self._shared[..., columns].to(psi.dtype), []
        masks = [None if pull.mask is None else pull.mask[..., columns].to(psi.dtype) for pull in self._pulls]
        for pull, mask in zip(self._pulls, masks, strict=True):
            difference = psi - (pull.target[..., columns].to(psi.dtype) - shared)
            away.append(difference if mask is None else difference.mul_(mask))
        return away, masks

    def accept(self, which: Array | None) -> None:
        """See `Form`."""
        if self._keeps and which is not None:
            chosen = leave(which)[:, None, None]
            torch.where(chosen, self._current, self._before, out=self._before)
            torch.where(chosen, self._next, self._current, out=self._current)
        elif self._keeps:
            self._before, self._current, self._next = self._current, self._next, self._before
        else:
            self._before, self._current, self._next = self._current, self._next, self._current

    def gradient(self, S: Array) -> Array:
        """See `Form`; one more pass."""
        across = leave(S).view(self._problems, -1, self._clients, self._clients).to(self._arithmetic)
        total = self._zeros(2 + len(self._pulls), self._problems)
        for layer, columns in self._chunks():
            psi = self._current[..., columns].to(self._arithmetic)
            parts = [
                across[:, layer] @ psi,
                *(w * a for w, a in zip(self._weights, self._away(psi, columns)[0], strict=True)),
            ]
            for row, part in zip(total, [torch.stack(parts).sum(0), *parts], strict=True):
                row += _squares(part)
        return enter(total)

    def models(self, out: Tensor | None) -> Tensor:
        """See `Form`."""
        del self._before, self._next
        self._current += self._shared
        models = self._current.to(self._pulls[0].target.dtype)
        if out is None or self._places is None:
            return models
        return out.index_copy_(2, self._places, models)

    def _chunks(self) -> Iterator[tuple[int, slice]]:
        return chunks(self._layers, 3 * self._clients * self._problems, self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _squares(part: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``||part||_Z^2``, (B,) float64, Z = diag(weights) (K, 1); sums over a row are in the type of `part`."""
    squares = torch.linalg.vecdot(part, part).to(torch.float64)
    total: Tensor = squares.sum(-1) if weights is None else squares @ weights[:, 0].to(torch.float64)
    if part.dtype == torch.float32 and not bool(total.isfinite().all()) and bool(part.isfinite().all()):
        return _squares(part.to(torch.float64), weights)  # beyond its range
    return total


def _some(tensor: T, places: Tensor) -> T:
    return None if tensor is None else tensor[..., places]

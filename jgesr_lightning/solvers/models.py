"""The models during a solve: which columns are held in which form, and what a step does to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, blind, enter, leave
from jgesr_lightning.graph.gram import BLOCK, chunks, cosine_from_gram, distances_from_gram, with_shared
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.coefficients import Coefficients, Reduce, common_patterns
from jgesr_lightning.solvers.columns import COPIES, Columns, dtype_of

T = TypeVar("T", Tensor, None, Tensor | None)
_LEAST, _LEAST_PER_CLIENT = 64, 8  # columns from which a step of a pattern in K x K takes less time than in d-space
_COVERED = 2 / 3  # of all columns from which it is done: copies of many others would take too much memory


class Sums(NamedTuple):
    """What one proposed step did, of B problems with G graphs each.

    Attributes:
        squares: ``||M_i * (Psi+ - T_i)||_{Z_i}^2`` of each of the problem's pulls, (B,) each.
        step: ||Psi+ - Psi||_F^2, (B,).
        gram: Gram matrices of Psi+ less a row that all share, (B, G, K, K).
        step_squares, step_gram: ``||M_i * (Psi+ - Psi)||_{Z_i}^2`` and those of Psi+ - Psi, where asked for.
    """

    squares: list[Array]
    step: Array
    gram: Array
    step_squares: list[Array] | None = None
    step_gram: Array | None = None


class Models:
    """The models Psi of a problem, (..., K, d), in the forms that suit what arrived.

    Everything arrived: coefficients, K x K, one block a graph. Gaps, on a CPU: coefficients of common patterns of gaps,
    and columns for the rest. Gaps, on an accelerator, which passes over d in less time: columns.

    Args:
        problem: what to minimise; its pulls (..., K, d), of one shape.
        layers: number of columns of each layer, for one graph a layer; None for one graph.
        reduce: sums partial results over processes; None: there is one.
        start: Psi_0, (..., K, d), or None to start from what arrived, gaps filled.
        previous: (..., K, d) models that fill the gaps, or None; see `fill_gaps`.
        least: columns that make a pattern a common one; None: where it pays.

    Attributes:
        squares: after `start`, ``||M_i * (Psi_0 - T_i)||_{Z_i}^2``, (B,) each.
        size: after `start`, squared norm of all the data together, (B,); not finite where they are not.
    """

    squares: list[Array]
    size: Array

    def __init__(
        self, problem: Problem, layers: Sequence[int] | None = None, reduce: Reduce | None = None, *,
        start: Tensor | None = None, previous: Tensor | None = None, least: int | None = None,
    ) -> None:  # fmt: skip
        self._like, self._reduce = problem.pulls[0].target, reduce
        pulls = tuple(replace(p, target=_flat(p.target), mask=_flat(p.mask)) for p in problem.pulls)
        self.problem, given = problem.but(pulls=pulls), (_flat(start), _flat(previous))
        self.problems, self._clients, size = pulls[0].target.shape
        layers = (size,) if layers is None else tuple(layers)
        masks = [pull.mask[0] for pull in pulls if pull.mask is not None]
        self._groups: list[list[Columns]] = []  # parts of one form and layer, of which single precision holds the sums
        if not masks:
            self._groups, self._reduce = [[Coefficients(self.problem, layers, *given, reduce=reduce)]], None
            return
        rest: Tensor | None = None
        if self.problems == 1 and (least is not None or not blind(masks[0])):
            patterns = common_patterns(
                torch.cat(masks), layers, least or max(_LEAST, _LEAST_PER_CLIENT * self._clients)
            )
            if patterns.sizes and (least is not None or len(patterns.order) >= _COVERED * size):
                self._groups = [[Coefficients(self.problem, layers, *given, patterns)]]
                rest, layers = patterns.rest, patterns.rest_layers
        self._hold(layers, rest, *given)

    def _hold(self, layers: Sequence[int], which: Tensor | None, start: Tensor | None, previous: Tensor | None) -> None:
        """Hold columns as they are, some in each part: all, or those of `which`; `layers` says how many of each."""
        pulls, width = len(self.problem.pulls), COPIES * self._clients * self.problems
        slices = list(chunks(layers, width, self._like.device)) or ([] if self._groups else [(0, slice(0, 0))])
        rows, dtype = self.problems * self._clients, dtype_of(self._like)
        # In few pieces of memory: many small ones that come and go would leave holes of several times their size.
        widest = max((c.stop - c.start for _, c in slices), default=0)
        few = max(1, BLOCK // max(1, widest))
        sizes = [rows * sum(layers)] * (2 + pulls) + [rows * widest]
        room = [torch.empty(size, dtype=dtype, device=self._like.device) for size in sizes]
        for layer, c in slices:
            begins = [rows * c.start] * (2 + pulls) + [0]
            shape = self.problems, self._clients, c.stop - c.start
            pieces = [r[begin:].narrow(0, 0, math.prod(shape)) for r, begin in zip(room, begins, strict=True)]
            mine = [piece.view(shape).squeeze(0) for piece in pieces]
            where = c if which is None else which[c]
            part = Columns(self.problem, (layer, len(layers)), where, start, previous, mine)
            if not self._groups or self._groups[-1][0].layer != part.layer or len(self._groups[-1]) == few:
                self._groups.append([])
            self._groups[-1].append(part)

    def start(self) -> tuple[Array, Array]:
        """Return the cosines of the rows of Psi_0, and D(Psi_0), (B, G, K, K)."""
        gram, norms, *self.squares = self._summed(lambda p: [*p.first, *_fidelity(p, p.away(p.psi))])
        inner = with_shared(gram)
        self.size = norms + gram.sum((-1, -2, -3)) * 0 + inner.diagonal(0, -2, -1).sum((-1, -2))
        return cosine_from_gram(inner), distances_from_gram(gram[..., :-1, :-1])

    def propose(self, S: Array, step: Array, momentum: Array | None = None, details: bool = False) -> Sums:
        """Compute Psi+ = Y - step (sum_i Z_i M_i * (Y - T_i) + S Y) at Y = Psi + momentum (Psi - Psi_before).

        `S` is (B, G, K, K); `step` and `momentum` are (B, 1, 1, 1).
        """
        across: dict[Any, Any] = {}  # step S and step Z_i, as each form holds them

        def proposed(part: Columns) -> list[Array]:
            psi = part.psi
            if momentum is None or part.before is None:
                base, part.before = psi, None  # and make room
            else:
                base = psi + part.cast(part.own(momentum)) * (psi - part.before)
            if (type(part), part.layer) not in across:
                size = part.cast(part.own(step))
                across[type(part), part.layer] = part.cast(part.own(step * S)), [size * w for w in part.weights]
            own, scaled = across[type(part), part.layer]
            change = self.problem.gradient_models(base, own, scaled, part.away(base), None if details else part.room())
            moved = part.squares(change)  # at once: its memory may be that of the next iterate
            part.propose(base, change)
            if base is not psi:
                change = part.proposed - psi
                moved = part.squares(change)
            return _measured(part, moved, change if details else None)

        return self._sums(proposed)

    def filter(self, S: Array) -> Sums:
        """Compute Psi+, the minimiser of ``sum_i ||M_i * (Psi - T_i)||_{Z_i}^2 + tr(Psi' S Psi)``; exact."""
        whole = torch.diag(torch.stack([pull.weights for pull in self.problem.pulls]).sum(0))
        inverse = enter(torch.linalg.inv(leave(S) + whole))

        def filtered(part: Columns) -> list[Array]:
            part.propose(part.solve(S, inverse), 0)
            return _measured(part, part.squares(part.proposed - part.psi))

        return self._sums(filtered)

    def accept(self, which: Array | None = None) -> None:
        """Make the proposed iterate the current one: of all problems, or of those of `which`, (B,) bool."""
        for part in chain(*self._groups):
            part.accept(which)

    def gradient(self, S: Array) -> tuple[Array, Array]:
        """Return the squared norm of the gradient by Psi, and the sum of the norms of its parts, (B,) each."""

        def squares(part: Columns) -> list[Array]:
            pulled = [weight * away for weight, away in zip(part.weights, part.away(part.psi), strict=True)]
            terms = [part.cast(part.own(S)) @ part.psi, *pulled]
            return [part.squares(term) for term in (sum(terms), *terms)]

        total, *parts = self._summed(squares)
        return total, sum(abs(part) ** 0.5 for part in parts)

    def result(self) -> Tensor:
        """Return Psi, (..., K, d), own memory, dtype and device of what arrived; the last call."""
        parts = [*chain(*self._groups)]
        self._groups = []
        for part in parts:
            part.release()
        result = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        while parts:  # and let go of each
            parts.pop().write(result.view(self.problems, *result.shape[-2:]))
        return result

    def _sums(self, measure: Callable[[Columns], list[Array]]) -> Sums:
        step, gram, *more = self._summed(measure)
        pulls = len(self.problem.pulls)
        return Sums(more[:pulls], step, gram, *([more[pulls:-1], more[-1]] if len(more) > pulls else []))

    def _summed(self, measure: Callable[[Columns], list[Array]]) -> list[Array]:
        """Return the sums of what parts measure, over processes in one exchange."""
        totals: list[Array] = []
        for group in self._groups:
            while (sums := group[0].total([measure(part) for part in group])) is None:
                for part in group:  # again; what the first try overwrote is done without
                    part.accuracy, part.before = torch.float64, None
            totals = [total + more for total, more in zip(totals, sums, strict=True)] if totals else sums
        if self._reduce is None:
            return totals
        flat = self._reduce(torch.cat([leave(total).flatten() for total in totals]))
        pieces = flat.split([leave(total).numel() for total in totals])
        return [enter(piece).reshape(total.shape) for piece, total in zip(pieces, totals, strict=True)]


def _measured(part: Columns, moved: Any, step: Array | None = None) -> list[Any]:
    """Return what the columns of a proposed step come to: `Sums` in a row; `step` where details are asked for."""
    fidelity = _fidelity(part, part.away(part.proposed))  # while what arrived is in the cache
    sums = [moved, part.gram(part.proposed), *fidelity]
    return sums if step is None else [*sums, *_fidelity(part, [mask * step for mask in part.masks()]), part.gram(step)]


def _fidelity(part: Columns, away: Iterable[Array]) -> list[Array]:
    return [part.squares(a, weights) for a, weights in zip(away, part.weights, strict=True)]


def _flat(tensor: T) -> T:
    """Return (..., K, d) as (B, K, d)."""
    return None if tensor is None else tensor.reshape(tensor.shape[:-2].numel(), *tensor.shape[-2:])

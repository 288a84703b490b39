"""The models during a solve: which columns are held in which form, and the sums over all forms and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, hidden, leave
from jgesr_lightning.graph.gram import cosine_from_gram, distances_from_gram, with_shared
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.coefficients import Coefficients, common_patterns
from jgesr_lightning.solvers.columns import Columns
from jgesr_lightning.solvers.form import Form, Reduce, Sums

_LEAST, _LEAST_PER_CLIENT = 64, 8  # columns from which a step of a pattern in K x K takes less time than in d-space
_COVERED = 2 / 3  # of all columns from which it is done: copies of many others would take too much memory


T = TypeVar("T", Tensor, None, Tensor | None)


class Start(NamedTuple):
    """Where the iteration starts: of B problems with G graphs each, N = B G.

    Attributes:
        cosines: of the rows of Psi_0, (N, K, K).
        distances: D(Psi_0), (N, K, K).
        squares: ``||M_i * (Psi_0 - T_i)||_{Z_i}^2``, (I, B).
        scale: ||Psi_0||_F + ||X_r||_F, (B,): the size of the numbers at hand; not finite where they are not.
    """

    cosines: Array
    distances: Array
    squares: Array
    scale: Array


class Models:
    """The models Psi of a problem, in the forms that suit what arrived.

    Everything arrived: coefficients, K x K, one block a graph. Gaps, on a CPU: coefficients of common patterns of gaps,
    and columns for the rest. Gaps, on an accelerator, which passes over d in less time: columns.

    Args:
        problem: what to minimise; its pulls (..., K, d), of one shape.
        layers: number of columns of each layer, for one graph a layer; None for one graph.
        reduce: sums partial results over processes; None: there is one.
        start: Psi_0, (..., K, d), or None to start from what arrived, gaps filled.
        previous: (..., K, d) models that fill the gaps, or None; see `fill_gaps`.
        least: columns that make a pattern a common one; None: where it pays.
    """

    def __init__(
        self,
        problem: Problem,
        layers: Sequence[int] | None = None,
        reduce: Reduce | None = None,
        *,
        start: Tensor | None = None,
        previous: Tensor | None = None,
        least: int | None = None,
    ) -> None:
        self.shape = problem.pulls[0].target.shape
        pulls = tuple(replace(p, target=_flat(p.target), mask=_flat(p.mask)) for p in problem.pulls)
        problem = problem.but(pulls=pulls)
        start, previous = _flat(start), _flat(previous)
        problems, clients, size = pulls[0].target.shape
        layers = (size,) if layers is None else tuple(layers)
        self.problems, self.graphs, self.problem = problems, problems * len(layers), problem
        self._reduce, self._forms = reduce, list[Form]()
        mask = pulls[0].mask
        if mask is None:
            self._forms = [Coefficients(problem, layers, start, reduce=reduce)]
            return
        if problems == 1 and (least is not None or not hidden(mask)):
            patterns = common_patterns(mask[0], layers, least or max(_LEAST, _LEAST_PER_CLIENT * clients))
            if patterns.sizes and (least is not None or len(patterns.order) >= _COVERED * size):
                self._forms = [Coefficients(problem, layers, start, previous, patterns)]
                if len(patterns.rest):
                    self._forms.append(Columns(problem, patterns.rest_layers, start, previous, patterns.rest))
        self._forms = self._forms or [Columns(problem, layers, start, previous)]

    def start(self) -> Start:
        """Read the data once, and go to Psi_0."""
        gram, squares, norms = self._total([form.begin() for form in self._forms])
        inner = with_shared(gram)
        rows = inner.diagonal(dim1=-2, dim2=-1).reshape(self.problems, -1).sum(-1)
        scale = rows.clamp_min(0).sqrt() + norms[0].sqrt() + 0 * gram.reshape(self.problems, -1).sum(-1)
        distances = distances_from_gram(gram[:, :-1, :-1])
        self.squares = enter(squares)
        return Start(enter(cosine_from_gram(inner)), enter(distances), self.squares, enter(scale))

    def propose(self, S: Array, step: Array, momentum: Array | None = None, *, details: bool = False) -> Sums:
        """Propose a step; see `Form`."""
        return self._reduced([form.propose(S, step, momentum, details=details) for form in self._forms])

    def filter(self, S: Array) -> Sums:
        """Propose the filtered models; see `Form`."""
        return self._reduced([form.filter(S) for form in self._forms])

    def accept(self, which: Array | None = None) -> None:
        """Make the proposed iterate the current one, of some problems."""
        for form in self._forms:
            form.accept(which)

    def gradient(self, S: Array) -> tuple[Array, Array]:
        """Return the squared norm of the gradient by Psi, and the sum of the norms of its parts, (B,) each."""
        (total,) = self._total([(leave(form.gradient(S)),) for form in self._forms])
        squares = enter(total)
        return squares[0], (abs(squares[1:]) ** 0.5).sum(0)

    def result(self) -> Tensor:
        """Return Psi, (..., K, d), own memory, dtype and device of what arrived; the last call."""
        if len(self._forms) == 1:
            (form,) = self._forms
            if getattr(form, "reduced", True) or isinstance(form, Columns):
                return form.models(None).view(self.shape)
        target = self.problem.pulls[0].target
        out = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        while self._forms:  # and let go of each
            self._forms.pop(0).models(out)
        return out.view(self.shape)

    def _reduced(self, sums: list[Sums]) -> Sums:
        if len(sums) == 1 and (self._reduce is None or self._forms[0].reduced):
            return sums[0]
        present = [tuple(leave(part) for part in each if part is not None) for each in sums]
        return Sums(*map(enter, self._total(present)))

    def _total(self, each: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sum over forms, and over processes in one exchange."""
        sums = [torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] for parts in zip(*each, strict=True)]
        if self._reduce is None or self._forms[0].reduced:
            return tuple(sums)
        flat = self._reduce(torch.cat([part.flatten() for part in sums]))
        pieces = flat.split([part.numel() for part in sums])
        return tuple(piece.view(part.shape) for piece, part in zip(pieces, sums, strict=True))


def _flat(tensor: T) -> T:
    """Return (..., K, d) as (B, K, d)."""
    return None if tensor is None else tensor.reshape(tensor.shape[:-2].numel(), *tensor.shape[-2:])

r"""The models as coefficients: the whole iteration in K x K, once for each pattern of gaps.

In a column j the iteration is :math:`\psi^+ = \psi - z * m_j * (\psi - x_j) - S \psi`, which knows of j only which
clients delivered, :math:`m_j`. The columns of one pattern m therefore keep the form :math:`\Psi_t = C_t B`, with B the
rows of what arrived, gaps filled (and of the start, where it is another), and

.. math:: C_{t+1} = C_t - \mathrm{diag}(z * m) (C_t - I) - S_t C_t.

Rows of C sum to one, so a row r may be taken from all rows of B first: it keeps the digits of their differences. With
the Gram matrix G of :math:`B - 1 r^\top` the distances are those of :math:`C G C^\top`, the step is
:math:`\mathrm{tr}(\Delta C\, G\, \Delta C^\top)`, and the fidelity that of :math:`C - I`. The cost in d is one pass
for G and one for :math:`C B`, however many iterations. Where all arrived there is one pattern. With a twentieth of the
entries missing and K = 20, 211 patterns hold 93 of 100 columns; those of rare patterns are left to `columns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, leave, like, of, per_problem, repeated, solve
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import chunks, fill_gaps, self_product, work_dtype
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.form import Reduce, Sums


@dataclass(frozen=True)
class Patterns:
    """Which columns have common patterns of gaps.

    Attributes:
        order: indices of the columns of common patterns, pattern by pattern, patterns layer by layer.
        sizes, layers: number of columns and layer of each pattern, (P,); layers ascending.
        rest, rest_layers: indices of the other columns, ascending, and how many each layer has.
    """

    order: Tensor
    sizes: list[int]
    layers: list[int]
    rest: Tensor
    rest_layers: list[int]


def common_patterns(mask: Tensor, layers: Sequence[int], least: int) -> Patterns:
    """Sort the columns of `mask` (K, d) by layer and pattern; patterns of at least `least` columns are common ones."""
    layer_of = torch.repeat_interleave(torch.arange(len(layers)), torch.as_tensor(layers))
    key = layer_of.clone()
    for client, delivered in enumerate(mask):
        if client and client % 32 == 0:  # shorter numbers in the same order: earlier layers stay first
            key = torch.unique(key, return_inverse=True)[1]
        key.mul_(2).add_(delivered)
    key, order = key.sort(stable=True)
    sizes = torch.unique_consecutive(key, return_counts=True)[1]
    common = sizes >= least
    kept = common.repeat_interleave(sizes)
    rest, order, sizes = order[~kept].sort().values, order[kept], sizes[common]
    firsts = order[sizes.cumsum(0) - sizes]
    rest_layers = torch.bincount(layer_of[rest], minlength=len(layers)).tolist()
    return Patterns(order, sizes.tolist(), layer_of[firsts].tolist(), rest, rest_layers)


class Coefficients:
    """A `Form`; arrays of coefficients are (P, K, rows of B), one block a pattern, or one a graph where all arrived.

    Args:
        problem: with pulls of shape (B, K, d); B is one where there are patterns.
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        start: Psi_0, (B, K, d), or None to start from the first pull's target.
        previous: (B, K, d) models that fill the gaps, or None; see `fill_gaps`.
        patterns: which columns to hold, by pattern; None: all, which all arrived.
        reduce: sums over processes, where all arrived.
    """

    def __init__(
        self,
        problem: Problem,
        layers: Sequence[int],
        start: Tensor | None,
        previous: Tensor | None = None,
        patterns: Patterns | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        first = problem.pulls[0].target
        self._problem, self._patterns, self._reduce, self.reduced = problem, patterns, reduce, patterns is None
        self._layers = layers if patterns is None else patterns.sizes
        self._problems, self._clients = first.shape[:2]
        self._dtype, self._out_dtype = work_dtype(first), first.dtype
        self._sources = [pull.target for pull in problem.pulls] + ([] if start is None else [start])
        self._first = 0 if start is None else len(problem.pulls)
        full = torch.ones(self._problems * len(self._layers), self._clients, dtype=torch.float64, device=first.device)
        masks = [full for _ in problem.pulls]
        if patterns is not None:
            ends = list(itertools.accumulate(patterns.sizes))
            begins = patterns.order[[end - size for end, size in zip(ends, patterns.sizes, strict=True)]]
            masks = [full if p.mask is None else p.mask[0][:, begins].T.double() for p in problem.pulls]
            older = None if previous is None or start is not None else previous[..., patterns.order]
            self._sources = [source[..., patterns.order].to(self._dtype) for source in self._sources]
            for pull, source, mask in zip(problem.pulls, self._sources, masks, strict=False):
                for (begin, end), delivered in zip(itertools.pairwise([0, *ends]), mask > 0, strict=True):
                    if not delivered.all():
                        part, arrived = source[..., begin:end], delivered[:, None].expand(-1, end - begin)
                        part.copy_(
                            fill_gaps(part, arrived, pull.weights, None if older is None else older[..., begin:end])
                        )
            self._spans = [[p for p, at in enumerate(patterns.layers) if at == g] for g in range(len(layers))]
        self._weights = [enter((pull.weights * m)[..., None]) for pull, m in zip(problem.pulls, masks, strict=True)]

    def _parts(self, *, afresh: bool = False) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield (block, columns, rows of B less the shared row, and that row last)."""
        rows = 2 * self._clients * (len(self._sources) + 1) * self._problems
        for block, columns in chunks(self._layers, rows, self._shared.device):
            shared = self._shared[..., columns]
            if afresh:
                leading = self._sources[self._first][..., columns].to(self._dtype)
                torch.mean(leading, -2, keepdim=True, out=shared)
            yield (
                block,
                columns,
                torch.cat([*(s[..., columns].to(self._dtype) - shared for s in self._sources), shared], -2),
            )

    def begin(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Form`."""
        K, rows = self._clients, self._clients * len(self._sources)
        leading = self._sources[self._first]
        self._shared = torch.empty(self._problems, 1, leading.shape[-1], dtype=self._dtype, device=leading.device)
        shape = (self._problems, len(self._layers), rows + 1, rows + 1)
        full = torch.zeros(shape, dtype=torch.float64, device=leading.device)
        for block, _, part in self._parts(afresh=True):
            full[:, block] += self_product(part)
        full = full.flatten(0, 1)
        full = full if self._reduce is None or not self.reduced else self._reduce(full)
        full = (full + full.mT) / 2
        self._gram = enter(full[:, :-1, :-1].contiguous())
        selectors = enter(torch.eye(rows, dtype=torch.float64, device=full.device).view(-1, 1, K, rows))
        self._targets = [selectors[i] for i in range(len(self._problem.pulls))]
        self._target_grams = [target @ self._gram for target in self._targets]
        self._centring = like(torch.eye(K) - 1 / K, selectors)
        self._current = selectors[self._first] + 0 * self._gram[:, :K]
        self._current_gram = self._current @ self._gram
        self._before = self._current
        start = [*range(self._first * K, (self._first + 1) * K), rows]
        norms = full.diagonal(dim1=-2, dim2=-1)[:, :K] + 2 * full[:, :K, -1] + full[:, -1:, -1]
        norms = (norms * (leave(self._weights[0])[..., 0] > 0)).reshape(self._problems, -1).sum(-1)
        squares = self._squares(self._current, self._current_gram)
        return self._by_graph(full[:, start][:, :, start]), leave(squares), norms[None]

    def propose(self, S: Array, step: Array, momentum: Array | None, *, details: bool) -> Sums:
        """See `Form`."""
        base = self._current
        if momentum is not None:
            base = base + self._by_block(momentum) * (base - self._before)
        away = [base - target for target in self._targets]
        self._next = base - self._by_block(step) * self._problem.gradient_models(base, self._of(S), self._weights, away)
        return self._sums(details)

    def filter(self, S: Array) -> Sums:
        """See `Form`."""
        right = sum(weight * target for weight, target in zip(self._weights, self._targets, strict=True))
        z = sum(self._weights)
        if self._patterns is None:
            self._next = solve(z * like(torch.eye(self._clients), S) + S, right)
            return self._sums(details=False)
        whole = torch.diag(torch.stack([pull.weights for pull in self._problem.pulls]).sum(0))
        inverse = self._of(enter(torch.linalg.inv(leave(S) + whole)))
        z, right = z + 0 * self._current, right + 0 * self._current
        found = solve_columns(*(leave(part) for part in (self._of(S), inverse, z, right, self._current)))
        self._next = enter(found)
        return self._sums(details=False)

    def _sums(self, details: bool) -> Sums:
        self._next_gram = self._next @ self._gram
        step, step_gram = self._next - self._current, self._next_gram - self._current_gram
        squares = self._squares(self._next, self._next_gram)
        norm = per_problem((step * step_gram).sum((-1, -2)), self._problems)[None]
        sums = Sums(squares, norm, self._products(self._next, self._next_gram))
        if not details:
            return sums
        moved = _rows([self._norm(weight, step, step_gram) for weight in self._weights])
        return sums._replace(step_squares=moved, step_gram=self._products(step, step_gram))

    def accept(self, which: Array | None) -> None:
        """See `Form`."""
        if which is None:
            self._before, self._current, self._current_gram = self._current, self._next, self._next_gram
            return
        where, chosen = of(self._gram).where, self._by_block(which[:, None, None])
        self._before = where(chosen, self._current, self._before)
        self._current = where(chosen, self._next, self._current)
        self._current_gram = where(chosen, self._next_gram, self._current_gram)

    def gradient(self, S: Array) -> Array:
        """See `Form`."""
        pulled = [w * (self._current - t) for w, t in zip(self._weights, self._targets, strict=True)]
        parts = [self._of(S) @ self._current, *pulled]
        each = [per_problem((p * (p @ self._gram)).sum((-1, -2)), self._problems) for p in (sum(parts), *parts)]
        return _rows(each)

    def models(self, out: Tensor | None) -> Tensor:
        """See `Form`; reads the data a second time."""
        coefficients = leave(self._current)
        # The shared row goes last: small terms are summed first, and the result is rounded once.
        padded = torch.cat([coefficients, torch.ones_like(coefficients[..., :1])], -1)
        wide = self._dtype if padded.device.type == "cpu" else torch.float64  # elsewhere products may be TF32
        blocks = padded.to(wide).view(self._problems, -1, *padded.shape[-2:])
        shape = (self._problems, self._clients, self._shared.shape[-1])
        mine = self._patterns is not None  # then the copies of what arrived make room for the result
        result = self._sources[0] if mine else torch.empty(shape, dtype=self._out_dtype, device=padded.device)
        for block, columns, part in self._parts():
            result[..., columns] = blocks[:, block] @ part.to(wide)
        if out is None or self._patterns is None:
            return result.to(self._out_dtype)
        return out.index_copy_(2, self._patterns.order, result.to(self._out_dtype))

    def _of(self, S: Array) -> Array:
        return S if self._patterns is None or len(S) == 1 else S[self._patterns.layers]

    def _by_block(self, numbers: Array) -> Array:
        """Give each block what is its problem's, (B, 1, 1)."""
        return numbers if self._problems == 1 else repeated(numbers, len(self._layers))

    def _by_graph(self, matrices: Array) -> Array:
        """Sum over the blocks of each graph, (P, ., .) to (N, ., .)."""
        return matrices if self._patterns is None else of(matrices).stack([matrices[s].sum(0) for s in self._spans])

    def _norm(self, weights: Array, coefficients: Array, coefficients_gram: Array) -> Array:
        """Return ||M * (C B)||_Z^2 of each problem, (B,), given C G, too."""
        return per_problem((weights * (coefficients * coefficients_gram)).sum((-1, -2)), self._problems)

    def _squares(self, coefficients: Array, coefficients_gram: Array) -> Array:
        away = zip(self._weights, self._targets, self._target_grams, strict=True)
        return _rows([self._norm(w, coefficients - t, coefficients_gram - g) for w, t, g in away])

    def _products(self, coefficients: Array, coefficients_gram: Array) -> Array:
        """Return the Gram matrices of C B, (N, K, K), less the mean of its rows: differences, before any product."""
        apart, apart_gram = self._centring @ coefficients, self._centring @ coefficients_gram
        return self._by_graph(apart_gram @ apart.swapaxes(-1, -2))


def _rows(rows: list[Array]) -> Array:
    return rows[0][None] if len(rows) == 1 else of(rows[0]).stack(rows)

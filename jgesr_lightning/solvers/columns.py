"""Models as they are, K x c: one pass over d a step.

A step reads Psi and X_r once and writes the new Psi once, some columns at a time, and takes while they are in the cache
the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity; nothing is of size
K x K x d. Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it
would cost the digits of what the clients' models differ by. X_r is held likewise, and is not a number where nothing
arrived: operations with a mask of bools take eight times as long as others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, enter, leave
from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import fill_gaps, self_product
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers.part import Part, dtype_of

COPIES = 8  # of its columns, that a step keeps in the cache


class Columns(Part):
    """A `Part`: columns of one layer, few enough for the cache; iterates are (B, K, c).

    Args:
        problem: with pulls of shape (B, K, d).
        layer: which graph they have, of how many.
        columns: which of all columns.
        start: Psi_0, (B, K, d), or None to start from the first pull's target.
        previous: (B, K, d) models that fill the gaps, or None; see `fill_gaps`.
    """

    def __init__(
        self,
        problem: Problem,
        layer: tuple[int, int],
        columns: slice | Tensor,
        start: Tensor | None,
        previous: Tensor | None,
    ) -> None:
        self._dtype, self._columns, self._layer = dtype_of(problem.pulls[0].target), columns, layer
        self.weights = [pull.weights[:, None].to(self._dtype) for pull in problem.pulls]
        older = previous if start is None else start
        older = None if older is None else older[..., columns]
        self._targets, norms = list[Tensor](), problem.pulls[0].weights.new_zeros(())
        for pull in problem.pulls:
            target = pull.target[..., columns].to(self._dtype)
            if pull.mask is not None:
                target = fill_gaps(target, pull.mask[..., columns], pull.weights, older)
            self._targets.append(target)
            norms = norms + target.double().square().sum((-1, -2))
        psi = self._targets[0] if start is None else start[..., columns].to(self._dtype)
        self._shared = psi.mean(-2, keepdim=True)
        self.psi = psi - self._shared
        self._targets = [target - self._shared for target in self._targets]
        for pull, target in zip(problem.pulls, self._targets, strict=True):
            if pull.mask is not None:
                target.masked_fill_(~pull.mask[..., columns], torch.nan)
        self.first = self.gram(torch.cat([self.psi, self._shared], -2)), enter(norms)

    def of_graph(self, matrices: Array) -> Tensor:
        """See `Part`."""
        return leave(matrices[self._layer[0] :: self._layer[1]]).to(self._dtype)

    def of_problem(self, numbers: Array) -> Tensor:
        """See `Part`."""
        return leave(numbers).to(self._dtype)

    def away(self, psi: Tensor) -> list[Tensor]:
        """See `Part`."""
        return [torch.nan_to_num_(psi - target) for target in self._targets]

    def masks(self) -> list[Tensor]:
        """See `Part`."""
        return [torch.nan_to_num_(target - target + 1) for target in self._targets]

    def solve(self, S: Array, inverse: Array) -> Tensor:
        """See `Part`; exact in every column, see `solve_columns`."""
        own = [leave(matrices[self._layer[0] :: self._layer[1]]) for matrices in (S, inverse)]
        nothing, pulls = 0 * self.psi, zip(self.weights, self.masks(), self.away(0 * self.psi), strict=True)
        terms = [(weight * (nothing + mask), -weight * away) for weight, mask, away in pulls]
        z, right = (torch.stack(each).double().sum(0) for each in zip(*terms, strict=True))
        return solve_columns(own[0], own[1], z, right, self.psi.double()).to(self._dtype)

    def gram(self, psi: Tensor) -> Array:
        """See `Part`."""
        one, (layer, layers) = self_product(psi), self._layer
        if layers == 1:
            return enter(one)
        grams = one.new_zeros(len(one), layers, *one.shape[1:])
        grams[:, layer] = one
        return enter(grams.flatten(0, 1))

    def squares(self, psi: Tensor, weights: Tensor | float = 1.0) -> Array:
        """See `Part`; sums over a row are in the type of `psi`."""
        norms = torch.linalg.vector_norm(psi, dim=-1, keepdim=True).double()
        if psi.dtype == torch.float32 and not bool(norms.max() < 1e19):  # squares beyond its range
            norms = torch.linalg.vector_norm(psi, dim=-1, keepdim=True, dtype=torch.float64)
        return enter((weights * (norms * norms)).sum((-1, -2)))

    def models(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """See `Part`."""
        yield self._columns, self.psi + self._shared

"""Entries missing: columns of common patterns of gaps in K x K, the others in d-space, as one set of signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import cosine_from_gram, distances_from_gram, with_shared
from jgesr_lightning.graph.prox import Array
from jgesr_lightning.solvers.columns import Columns
from jgesr_lightning.solvers.patterns import Patterns, common_patterns
from jgesr_lightning.solvers.signals import Moments, Reduce, Start, to_host
from jgesr_lightning.solvers.uplink import Uplink

_LEAST, _LEAST_PER_CLIENT = 64, 8  # columns from which a step of a pattern in K x K takes less time than in d-space
_COVERED = 2 / 3  # of all columns from which it is done: copies of many others would take too much memory


class Part(Protocol):
    """Some of the columns during a solve; its sums are over these columns, float64 on the device of the data."""

    def begin(self) -> tuple[Tensor, Tensor]:
        """Go to Psi_0; return the Gram matrices of ``[Psi_0 - 1 r'; r]``, (G, K + 1, K + 1), and ||Xr||_F^2, (1,)."""

    def step(self, pull: Array, smooth: Array, momentum: float, details: bool) -> Tensor:
        """Propose a step, see `Signals`; return, in one row, what it takes to tell where it leads.

        Without details: ||M * Psi - Xr||_Z^2, ||Psi+ - Psi||_F^2, the Gram matrices of Psi+ (G, K, K). With details:
        ||M * Psi+ - Xr||_Z^2, the second as before, ||M * (Psi+ - Psi)||_Z^2, the Gram matrices of Psi+ and of
        Psi+ - Psi.
        """

    def filter(self, smooth: Array, weights: Array) -> Tensor:
        """Propose the filtered models, see `Signals`; return ||M * Psi+ - Xr||_Z^2, ||Psi+ - Psi||_F^2, Gram(Psi+)."""

    def accept(self) -> None:
        """Make the proposed iterate the current one."""

    def residual(self) -> Tensor:
        """Return ||M * Psi - Xr||_Z^2, (1,)."""

    def release(self) -> None:
        """Let go of what is not needed for `models`, which makes room for the result; only `models` is called then."""

    def models(self, out: Tensor | None) -> Tensor:
        """Write the columns of Psi to their places in `out`, (K, d), and return it; the last call.

        Without `out`, a part that has all columns returns what it holds.
        """


class Masked:
    """Signals of which entries may be missing.

    Args:
        received: X_r, (K, d); read, never modified.
        weights: diagonal of Z, (K,).
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        reduce: sums partial results over processes.
        mask: (K, d) bool, True where an entry arrived; None: everywhere.
        previous: (K, d) models for the entries that did not arrive; see `Uplink`.
        start: Psi_0, (K, d), or None to start from what arrived.
        least: columns that make a pattern a common one. None: where it pays, on a CPU if most columns are of
            such patterns (an accelerator passes over d in less time than the host over the patterns).
    """

    def __init__(
        self,
        received: Tensor,
        weights: Array,
        layers: Sequence[int],
        reduce: Reduce,
        *,
        mask: Tensor | None,
        previous: Tensor | None = None,
        start: Tensor | None = None,
        least: int | None = None,
    ) -> None:
        uplink = Uplink(received, torch.from_numpy(weights).to(received.device), mask, previous, start)
        self._shape, self._dtype = received.shape, received.dtype
        self._graphs = len(layers)
        self._reduce = reduce
        self._parts: list[Part] = []
        if mask is not None and received.device.type == "cpu":
            clients, size = mask.shape
            groups = common_patterns(mask, layers, least or max(_LEAST, _LEAST_PER_CLIENT * clients))
            if len(groups.sizes) and (least is not None or len(groups.order) >= _COVERED * size):
                self._parts.append(Patterns(uplink, groups, len(layers)))
                if len(groups.rest):
                    self._parts.append(Columns(uplink.take(groups.rest), groups.rest_layers, groups.rest))
        self._whole = not self._parts
        if self._whole:
            self._parts.append(Columns(uplink, layers))

    def start(self) -> Start:
        """Fill the gaps, and read the data once; see `Signals`."""
        grams, norms = zip(*(part.begin() for part in self._parts), strict=True)
        total = torch.stack(grams).sum(0)
        full = self._reduce(torch.cat([total.flatten(), torch.stack(norms).sum(0)]))
        if not bool(torch.isfinite(full).all()):
            raise ValueError("received holds values that are not finite, or whose squares are not")
        total, arrived = full[:-1].view_as(total), full[-1:]
        inner = with_shared(total)
        scale = inner.diagonal(dim1=-2, dim2=-1).sum().clamp_min(0).sqrt() + arrived.sqrt()
        return Start(
            cosines=to_host(cosine_from_gram(inner)),
            distances=to_host(distances_from_gram(total[:, :-1, :-1])),
            residual=None,
            scale=float(scale),
        )

    def propose(
        self, pull: Array, smooth: Array, momentum: float = 0.0, *, details: bool = False
    ) -> Callable[[], Moments]:
        """See `Signals`. With details, the fidelity of the new Psi and the Gram matrix of the step are taken too."""
        packed = self._sum([part.step(pull, smooth, momentum, details) for part in self._parts])

        def wait() -> Moments:
            numbers = to_host(packed)
            if not details:
                (residual, step_sq), (distances,) = self._unpacked(numbers, 2, 1)
                return Moments(distances, step_sq, last_residual=residual)
            (residual, step_sq, step_residual), (distances, step_distances) = self._unpacked(numbers, 3, 2)
            return Moments(distances, step_sq, residual, step_distances=step_distances, step_residual=step_residual)

        return wait

    def propose_filtered(self, smooth: Array, weights: Array) -> Moments:
        """See `Signals`; exact in every column."""
        packed = self._sum([part.filter(smooth, weights) for part in self._parts])
        (residual, step_sq), (distances,) = self._unpacked(to_host(packed), 2, 1)
        return Moments(distances, step_sq, residual)

    def _sum(self, sums: list[Tensor]) -> Tensor:
        return self._reduce(sums[0] if len(sums) == 1 else torch.stack(sums).sum(0))

    def _unpacked(self, numbers: Array, scalars: int, matrices: int) -> tuple[list[float], Array]:
        clients = self._shape[0]
        grams = torch.from_numpy(numbers[scalars:]).view(matrices, self._graphs, clients, clients)
        return numbers[:scalars].tolist(), distances_from_gram(grams).numpy()

    def accept(self) -> None:
        """See `Signals`."""
        for part in self._parts:
            part.accept()

    def residual(self) -> float:
        """See `Signals`; one more pass."""
        return float(self._sum([part.residual() for part in self._parts]))

    def models(self) -> Tensor:
        """Return Psi, (K, d), dtype and device of `received`."""
        if self._whole:
            return self._parts[0].models(None)
        for part in self._parts:
            part.release()
        models = torch.empty(self._shape, dtype=self._dtype)
        for part in self._parts:
            part.models(models)
        return models

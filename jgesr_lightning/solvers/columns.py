r"""Entries missing: the iteration in d-space, one fused pass over the columns a step.

A step reads Psi, X_r and M once and writes the new Psi once, chunk by chunk, and takes from each chunk while it is in
the cache the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity residual of the
old Psi. Two buffers of the size of the models alternate, so that a refused or non-finite step leaves the last one
untouched; there is nothing of size K x K x d, and the mask stays bool.

Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it would cost
the digits of what the clients' models differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import (
    Scratch,
    cosine_from_gram,
    distances_from_gram,
    numpy_is_faster,
    row_squares,
    self_product,
)
from jgesr_lightning.graph.prox import Array
from jgesr_lightning.solvers.chunk import Chunk, Measured, residual_tensors, step_arrays, step_tensors
from jgesr_lightning.solvers.signals import Moments, Reduce, Start, column_chunks, to_host, work_dtype


class Columns:
    """Signals held as a K x d matrix.

    Entries that did not arrive start from `previous`; without it, from the weighted mean of those who delivered that
    coordinate; from zero where nobody did. What `received` holds there is never used.

    Args:
        received: X_r, (K, d); read, never modified.
        weights: diagonal of Z, (K,).
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        reduce: sums partial results over processes.
        mask: (K, d) bool, True where an entry arrived; None: everywhere.
        previous: (K, d) models for the entries that did not arrive.
        start: Psi_0, (K, d), or None to start from what arrived.
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
    ) -> None:
        self._received = received
        self._weights = torch.from_numpy(weights).to(received.device)
        self._layers = layers
        self._reduce = reduce
        self._mask = mask
        self._previous = previous
        self._from = start
        self._type = work_dtype(received)
        size, device = received.shape, received.device
        self._scratch = Scratch(device)
        self._shared = torch.empty(size[1], dtype=self._type, device=device)
        self._current = torch.empty(size, dtype=self._type, device=device)
        self._other = torch.empty(size, dtype=self._type, device=device)

    def start(self) -> Start:
        """Fill the gaps, and read the data once; see `Signals`."""
        rows = len(self._received) + 1
        total = torch.zeros(len(self._layers), rows, rows, dtype=torch.float64, device=self._shared.device)
        norms = torch.zeros(1, dtype=torch.float64, device=self._shared.device)
        stray = torch.zeros((), dtype=torch.bool, device=self._shared.device)
        for layer, columns in column_chunks(self._layers, rows, self._shared.device):
            part, received, stray_here = self._first(columns)
            stray |= stray_here
            shared = self._shared[columns]
            torch.mean(part, 0, out=shared)
            part = part - shared
            self._current[:, columns] = part
            total[layer] += self_product(torch.cat([part, shared[None]]).to(torch.float64))
            norms += received.to(torch.float64).square().sum()
        if bool(stray):  # not finite times zero is not zero: such noise has to go before a mask can be multiplied by
            assert self._mask is not None
            self._received = torch.where(self._mask, self._received, 0)
        full = self._reduce(torch.cat([total.flatten(), norms]))
        if not bool(torch.isfinite(full).all()):
            raise ValueError("received holds values that are not finite, or whose squares are not")
        total, norms = full[:-1].view_as(total), full[-1:]
        by_shared = total[:, :-1, -1]
        inner = total[:, :-1, :-1] + by_shared[:, :, None] + by_shared[:, None, :] + total[:, -1:, -1:]
        scale = inner.diagonal(dim1=-2, dim2=-1).sum().clamp_min(0).sqrt() + norms.sqrt()
        return Start(
            cosines=to_host(cosine_from_gram(inner)),
            distances=to_host(distances_from_gram(total[:, :-1, :-1])),
            residual=None,
            scale=float(scale),
        )

    def _first(self, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return Psi_0, what arrived (zero elsewhere), and whether something not finite stands in a gap."""
        raw = self._received[:, columns].to(self._type)
        if self._mask is None:
            first, arrived, stray = raw, raw, torch.zeros((), dtype=torch.bool, device=raw.device)
        else:
            mask = self._mask[:, columns]
            arrived = torch.where(mask, raw, 0)
            stray = ~(torch.isfinite(raw) | mask).all()
            if self._previous is not None:
                filler = self._previous[:, columns].to(self._type)
            else:
                shares = self._weights[:, None].to(self._type) * mask
                total = shares.sum(0)
                filler = torch.where(total > 0, (shares * arrived).sum(0) / total, 0)
            first = torch.where(mask, raw, filler)
        if self._from is not None:
            first = self._from[:, columns].to(self._type)
        return first, arrived, stray

    def propose(
        self, pull: Array, smooth: Array, momentum: float = 0.0, *, details: bool = False
    ) -> Callable[[], Moments]:
        """See `Signals`. With details, the fidelity of the new Psi and the Gram matrix of the step are taken too."""
        device = self._shared.device
        clients, graphs = len(pull), len(self._layers)
        in_numpy = numpy_is_faster(self._current)
        towards = torch.from_numpy(pull).to(device, self._type)[:, None]
        across = torch.from_numpy(-smooth).to(device, self._type if in_numpy else torch.float64)
        step: Callable[..., Measured] = step_arrays if in_numpy else step_tensors
        grams = torch.zeros(2 if details else 1, graphs, clients, clients, dtype=torch.float64, device=device)
        squares = torch.zeros(3 if details else 2, clients, dtype=torch.float64, device=device)
        sum_grams, sum_squares = (grams.numpy(), squares.numpy()) if in_numpy else (grams, squares)
        combine = across.numpy() if in_numpy else across
        with np.errstate(over="ignore", invalid="ignore"):  # such a step is refused by whoever reads its numbers
            for layer, chunk in self._chunks(in_numpy):
                done = step(chunk, towards, combine[layer], momentum, details)
                sum_grams[0, layer] += done.gram
                sum_squares[0] += done.residual
                sum_squares[1] += done.step
                if details:
                    sum_grams[1, layer] += done.step_gram
                    sum_squares[2] += done.masked_step
        sums = torch.stack([squares[0] @ self._weights, squares[1].sum(), *(squares[2:] @ self._weights)])
        packed = self._reduce(torch.cat([sums, grams.flatten()]))

        def wait() -> Moments:
            numbers = torch.from_numpy(to_host(packed))
            distances = distances_from_gram(numbers[len(sums) :].view(grams.shape)).numpy()
            residual, step_sq = float(numbers[0]), float(numbers[1])
            if not details:
                return Moments(distances[0], step_sq, last_residual=residual)
            return Moments(
                distances[0], step_sq, residual, step_distances=distances[1], step_residual=float(numbers[2])
            )

        return wait

    def _chunks(self, in_numpy: bool) -> Iterator[tuple[int, Chunk]]:
        """Yield (layer, chunk): all a step touches, as numpy's arrays or torch's tensors on the same memory."""
        rows, device = self._current.shape[0], self._shared.device
        received = self._received
        whole: list[Any] = [self._current, self._other, self._shared, self._mask]
        if in_numpy:
            whole = [part if part is None else part.numpy() for part in whole]
        psi, other, shared, mask = whole
        for layer, columns in column_chunks(self._layers, (2 if in_numpy else 1) * rows, device):
            width = columns.stop - columns.start
            arrived = received[:, columns].to(self._type)
            buffers = [self._scratch.take(name, rows, width, self._type) for name in ("base", "residual", "change")]
            chunk = Chunk(
                psi[:, columns],
                other[:, columns],
                arrived.numpy() if in_numpy else arrived,
                shared[columns],
                None if mask is None else mask[:, columns],
                *(part.numpy() if in_numpy else part for part in buffers),
            )
            yield layer, chunk

    def propose_filtered(self, smooth: Array, weights: Array) -> Moments:
        """See `Signals`; exact in every column, see `solve_columns`."""
        device, clients = self._shared.device, len(weights)
        L = torch.from_numpy(smooth).to(device)
        z = torch.from_numpy(weights).to(device)
        F = torch.linalg.inv(torch.diag(z) + L) * z
        grams = torch.zeros(len(self._layers), clients, clients, dtype=torch.float64, device=device)
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for layer, columns in column_chunks(self._layers, 8 * clients, device):
            old = self._current[:, columns].to(torch.float64)
            shared = self._shared[columns].to(torch.float64)
            received = self._received[:, columns].to(torch.float64) - shared
            arrived = torch.ones_like(received, dtype=torch.bool) if self._mask is None else self._mask[:, columns]
            received = torch.where(arrived, received, 0)
            new = solve_columns(L[layer], F[layer], z[:, None], arrived, received, old)
            self._other[:, columns] = new
            residual = torch.where(arrived, new - received, 0)
            squares[0] += torch.linalg.vecdot(residual, residual) @ z
            squares[1] += (new - old).square().sum()
            grams[layer] += self_product(new)
        numbers = torch.from_numpy(to_host(self._reduce(torch.cat([squares, grams.flatten()]))))
        distances = distances_from_gram(numbers[2:].view(grams.shape)).numpy()
        return Moments(distances, float(numbers[1]), float(numbers[0]))

    def accept(self) -> None:
        """See `Signals`."""
        self._current, self._other = self._other, self._current

    def residual(self) -> float:
        """See `Signals`; one more pass."""
        total = torch.zeros(1, dtype=torch.float64, device=self._shared.device)
        for _, chunk in self._chunks(in_numpy=False):
            total += row_squares(residual_tensors(chunk, chunk.psi)) @ self._weights
        return float(self._reduce(total))

    def models(self) -> Tensor:
        """Return Psi, (K, d), dtype and device of `received`."""
        self._current += self._shared
        return self._current.to(self._received.dtype)

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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import Scratch, numpy_is_faster, row_squares, self_product
from jgesr_lightning.graph.prox import Array
from jgesr_lightning.solvers.chunk import Chunk, Measured, residual_tensors, step_arrays, step_tensors
from jgesr_lightning.solvers.signals import column_chunks
from jgesr_lightning.solvers.uplink import Uplink


class Columns:
    """Signals held as a K x d matrix; a `Part` of `Masked`.

    Args:
        uplink: what arrived.
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        columns: where they belong among all columns; None: they are all.
    """

    def __init__(self, uplink: Uplink, layers: Sequence[int], columns: Tensor | None = None) -> None:
        self._uplink = uplink
        self._columns = columns
        self._layers = layers
        size, device = uplink.received.shape, uplink.received.device
        self._scratch = Scratch(device)
        self._shared = torch.empty(size[1], dtype=uplink.dtype, device=device)
        self._current = torch.empty(size, dtype=uplink.dtype, device=device)
        self._other = torch.empty(size, dtype=uplink.dtype, device=device)

    def begin(self) -> tuple[Tensor, Tensor]:
        """See `Part`."""
        uplink, device = self._uplink, self._shared.device
        rows = len(uplink.received) + 1
        total = torch.zeros(len(self._layers), rows, rows, dtype=torch.float64, device=device)
        norms = torch.zeros(1, dtype=torch.float64, device=device)
        stray = torch.zeros((), dtype=torch.bool, device=device)
        for layer, columns in column_chunks(self._layers, rows, device):
            part, arrived = uplink.filled(columns)
            if uplink.mask is not None:
                stray |= ~(torch.isfinite(uplink.received[:, columns]) | uplink.mask[:, columns]).all()
            if uplink.start is not None:
                part = uplink.start[:, columns].to(uplink.dtype)
            shared = self._shared[columns]
            torch.mean(part, 0, out=shared)
            part = part - shared
            self._current[:, columns] = part
            total[layer] += self_product(torch.cat([part, shared[None]]).to(torch.float64))
            norms += arrived.to(torch.float64).square().sum()
        if bool(stray):  # not finite times zero is not zero: such noise has to go before a mask can be multiplied by
            assert uplink.mask is not None
            self._uplink = replace(uplink, received=torch.where(uplink.mask, uplink.received, 0))
        if self._columns is not None:  # copies, not needed any more
            self._uplink = replace(self._uplink, previous=None, start=None)
        return total, norms

    def step(self, pull: Array, smooth: Array, momentum: float, details: bool) -> Tensor:
        """See `Part`."""
        device = self._shared.device
        clients, graphs = len(pull), len(self._layers)
        in_numpy = numpy_is_faster(self._current)
        towards = torch.from_numpy(pull).to(device, self._shared.dtype)[:, None]
        across = torch.from_numpy(-smooth).to(device, self._shared.dtype if in_numpy else torch.float64)
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
        weights = self._uplink.weights
        sums = torch.stack([squares[0] @ weights, squares[1].sum(), *(squares[2:] @ weights)])
        return torch.cat([sums, grams.flatten()])

    def _chunks(self, in_numpy: bool) -> Iterator[tuple[int, Chunk]]:
        """Yield (layer, chunk): all a step touches, as numpy's arrays or torch's tensors on the same memory."""
        rows, device = self._current.shape[0], self._shared.device
        received, dtype = self._uplink.received, self._shared.dtype
        whole: list[Any] = [self._current, self._other, self._shared, self._uplink.mask]
        if in_numpy:
            whole = [part if part is None else part.numpy() for part in whole]
        psi, other, shared, mask = whole
        for layer, columns in column_chunks(self._layers, (2 if in_numpy else 1) * rows, device):
            width = columns.stop - columns.start
            arrived = received[:, columns].to(dtype)
            buffers = [self._scratch.take(name, rows, width, dtype) for name in ("base", "residual", "change")]
            chunk = Chunk(
                psi[:, columns],
                other[:, columns],
                arrived.numpy() if in_numpy else arrived,
                shared[columns],
                None if mask is None else mask[:, columns],
                *(part.numpy() if in_numpy else part for part in buffers),
            )
            yield layer, chunk

    def filter(self, smooth: Array, weights: Array) -> Tensor:
        """See `Part`; exact in every column, see `solve_columns`."""
        device, clients = self._shared.device, len(weights)
        L = torch.from_numpy(smooth).to(device)
        z = torch.from_numpy(weights).to(device)
        F = torch.linalg.inv(torch.diag(z) + L) * z
        grams = torch.zeros(len(self._layers), clients, clients, dtype=torch.float64, device=device)
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for layer, columns in column_chunks(self._layers, 8 * clients, device):
            old = self._current[:, columns].to(torch.float64)
            shared = self._shared[columns].to(torch.float64)
            received = self._uplink.received[:, columns].to(torch.float64) - shared
            mask = self._uplink.mask
            arrived = torch.ones_like(received, dtype=torch.bool) if mask is None else mask[:, columns]
            received = torch.where(arrived, received, 0)
            new = solve_columns(L[layer], F[layer], z[:, None], arrived, received, old)
            self._other[:, columns] = new
            residual = torch.where(arrived, new - received, 0)
            squares[0] += torch.linalg.vecdot(residual, residual) @ z
            squares[1] += (new - old).square().sum()
            grams[layer] += self_product(new)
        return torch.cat([squares, grams.flatten()])

    def accept(self) -> None:
        """See `Part`."""
        self._current, self._other = self._other, self._current

    def residual(self) -> Tensor:
        """See `Part`; one more pass."""
        total = torch.zeros(1, dtype=torch.float64, device=self._shared.device)
        for _, chunk in self._chunks(in_numpy=False):
            total += row_squares(residual_tensors(chunk, chunk.psi)) @ self._uplink.weights
        return total

    def release(self) -> None:
        """See `Part`."""
        self._uplink = Uplink(self._uplink.received.new_empty(0), self._uplink.weights)
        del self._other

    def models(self, out: Tensor | None) -> Tensor:
        """See `Part`."""
        self._current += self._shared
        models = self._current.to(self._uplink.received.dtype)
        if out is None or self._columns is None:
            return models
        return out.scatter_(1, self._columns.expand_as(models), models)

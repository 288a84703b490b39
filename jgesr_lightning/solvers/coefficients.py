r"""All entries arrived: the whole iteration in K x K.

Every iterate is then a combination of the rows that arrived, :math:`\Psi_t = C_t X_r`, with :math:`C_0 = I` and

.. math:: C_{t+1} = C_t - \tfrac1\rho (\mu Z (C_t - I) + 2 \alpha L_t C_t).

Rows of C sum to one, so a row r may be taken from all rows of :math:`X_r` first: it keeps the digits of their
differences. With the Gram matrix G of :math:`X_r - 1 r^\top` the distances are those of :math:`C G C^\top`, the step is
:math:`\mathrm{tr}(\Delta C\, G\, \Delta C^\top)`, and the fidelity that of :math:`C - I`. The cost in d is one pass
for G and one for :math:`C X_r`, however many iterations. Starting from other models P, the rows are those of both,
:math:`\Psi_t = C_t [X_r; P]`, C is K x 2K, and nothing else changes.

The K x K numbers live on the host whatever the device of the data: see `graph.prox` for why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.graph.gram import Scratch, cosine_from_gram, row_combinations, self_product, with_shared
from jgesr_lightning.graph.prox import Array
from jgesr_lightning.solvers.signals import Moments, Reduce, Start, column_chunks, to_host, work_dtype


class Coefficients:
    """Signals held as their coefficients by the rows of X_r (and of the start, where there is one).

    Args:
        received: X_r, (K, d), complete; read, never modified.
        weights: diagonal of Z, (K,).
        layers: number of columns of each layer, for one graph a layer; (d,) for one graph.
        reduce: sums partial results over processes.
        start: Psi_0, (K, d), or None to start from `received`.
    """

    def __init__(
        self, received: Tensor, weights: Array, layers: Sequence[int], reduce: Reduce, start: Tensor | None = None
    ) -> None:
        self._sources = [received] if start is None else [received, start]
        self._weights = weights
        self._layers = layers
        self._reduce = reduce
        self._clients = received.shape[0]
        self._rows = self._clients * len(self._sources)
        self._shared = torch.empty(received.shape[1], dtype=work_dtype(received), device=received.device)

    def start(self) -> Start:
        """Read the data once; see `Signals`."""
        full = to_host(self._reduce(self._augmented_gram()))
        if not np.isfinite(full).all():
            raise ValueError("received holds values that are not finite, or whose squares are not")
        full = (full + full.swapaxes(-1, -2)) / 2
        self._gram = np.ascontiguousarray(full[:, :-1, :-1])
        inner = with_shared(torch.from_numpy(full))
        first = self._rows - self._clients
        target = np.eye(self._clients, self._rows)
        self._target = np.broadcast_to(target, (len(full), *target.shape))
        self._current = np.broadcast_to(np.eye(self._clients, self._rows, first), self._target.shape).copy()
        self._before = self._current
        cosines = cosine_from_gram(inner[:, first:, first:]).numpy()
        norms = float(inner.diagonal(dim1=-2, dim2=-1).sum())
        distances = self._distances(self._current)
        return Start(cosines, distances, self._residual(self._current), float(np.sqrt(max(norms, 0))))

    def _augmented_gram(self) -> Tensor:
        """Return the Gram matrices of ``[Y - 1 r'; r]``, (G, rows + 1, rows + 1) float64, one chunk at a time."""
        size, device = self._rows + 1, self._shared.device
        total = torch.zeros(len(self._layers), size, size, dtype=torch.float64, device=device)
        scratch = Scratch(device)
        average = torch.full((1, self._clients), 1 / self._clients, dtype=torch.float64, device=device)
        for layer, columns in column_chunks(self._layers, size, device):
            part = scratch.take("part", size, columns.stop - columns.start, self._shared.dtype)
            shared = self._shared[columns]
            # Any row would do; their mean, rounded as it may be, is one that none of them is far from.
            row_combinations(average, self._sources[0][:, columns].to(shared.dtype), shared[None])
            for block, source in enumerate(self._sources):
                rows = part[block * self._clients : (block + 1) * self._clients]
                torch.sub(source[:, columns].to(shared.dtype), shared, out=rows)
            part[-1] = shared
            total[layer] += self_product(part)
        return total

    def propose(
        self, pull: Array, smooth: Array, momentum: float = 0.0, *, details: bool = False
    ) -> Callable[[], Moments]:
        """See `Signals`."""
        base = self._current
        if momentum:
            base = base + momentum * (self._current - self._before)
        self._next = base - pull[:, None] * (base - self._target) - smooth @ base
        step = self._next - self._current
        step_gram = step @ self._gram
        moments = Moments(
            distances=self._distances(self._next),
            step_sq=max(0.0, float(np.vdot(step_gram, step))),
            residual=self._residual(self._next),
            step_distances=self._distances(step) if details else None,
            step_residual=max(0.0, float(((step_gram * step).sum(-1) @ self._weights).sum())) if details else None,
        )
        return lambda: moments

    def propose_filtered(self, smooth: Array, weights: Array) -> Moments:
        """See `Signals`; the closed form (Z + smooth)^-1 Z."""
        Z = np.diag(weights)
        self._next = np.asarray(np.linalg.solve(Z + smooth, Z @ self._target), dtype=np.float64)
        step = self._next - self._current
        step_sq = max(0.0, float(np.vdot(step @ self._gram, step)))
        return Moments(self._distances(self._next), step_sq, self._residual(self._next))

    def accept(self) -> None:
        """See `Signals`."""
        self._before, self._current = self._current, self._next

    def residual(self) -> float:
        """See `Signals`."""
        return self._residual(self._current)

    def _residual(self, coefficients: Array) -> float:
        away = coefficients - self._target
        squares = ((away @ self._gram) * away).sum(-1)
        return max(0.0, float((squares @ self._weights).sum()))

    def _distances(self, coefficients: Array) -> Array:
        ones = np.ones(self._clients) / self._clients
        apart = coefficients - (ones @ coefficients)[:, None, :]  # differences of rows, before any product
        products = apart @ self._gram @ apart.swapaxes(-1, -2)
        norms = products.reshape(len(products), -1)[:, :: self._clients + 1].copy()
        distances = norms[:, :, None] + norms[:, None, :]
        distances -= products + products.swapaxes(-1, -2)  # sums of pairs, so that it is exactly symmetric
        np.maximum(distances, 0, out=distances)
        distances.reshape(len(products), -1)[:, :: self._clients + 1] = 0
        return distances

    def models(self) -> Tensor:
        """Return C X_r, (K, d), dtype and device of `received`; reads the data a second time."""
        received = self._sources[0]
        result = torch.empty_like(received, memory_format=torch.contiguous_format)
        shared, device = self._shared, self._shared.device
        # The shared row goes last: small terms are summed first, and the result is rounded once.
        padded = np.concatenate([self._current, np.ones((*self._current.shape[:-1], 1))], -1)
        coefficients = torch.from_numpy(padded).to(device, shared.dtype if device.type == "cpu" else torch.float64)
        scratch = Scratch(device)
        for layer, columns in column_chunks(self._layers, self._rows, device):
            width = columns.stop - columns.start
            part = scratch.take("part", self._rows + 1, width, shared.dtype)
            for block, source in enumerate(self._sources):
                rows = part[block * self._clients : (block + 1) * self._clients]
                torch.sub(source[:, columns].to(shared.dtype), shared[columns], out=rows)
            part[-1] = shared[columns]
            target = result[:, columns]
            if target.dtype == shared.dtype:
                row_combinations(coefficients[layer], part, target)
            else:
                combined = scratch.take("combined", self._clients, width, shared.dtype)
                target.copy_(row_combinations(coefficients[layer], part, combined))
        return result

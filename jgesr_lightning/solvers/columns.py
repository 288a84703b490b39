r"""Entries missing: the iteration in d-space, one fused pass over the columns a step.

A step reads Psi, X_r and M once and writes the new Psi once, chunk by chunk, and takes from each chunk while it is in
the cache the Gram matrix of the new Psi (for its distances), the length of the step and the fidelity residual of the
old Psi. Two buffers of the size of the models alternate, so that a refused or non-finite step leaves the last one
untouched; there is nothing of size K x K x d, and the mask stays bool.

Psi is held less one row r that all share: neither L nor the difference Psi - X_r sees it, and in float32 it would cost
the digits of what the clients' models differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jgesr_lightning.graph.filtering import solve_columns
from jgesr_lightning.graph.gram import (
    Scratch,
    cosine_from_gram,
    distances_from_gram,
    row_combinations,
    row_squares,
    self_product,
    zero_gaps,
)
from jgesr_lightning.graph.prox import Array
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
        towards = torch.from_numpy(pull).to(device, self._type)[:, None]
        across = torch.from_numpy(-smooth).to(device, self._type if device.type == "cpu" else torch.float64)
        clients, graphs = len(pull), len(self._layers)
        grams = torch.zeros(2 if details else 1, graphs, clients, clients, dtype=torch.float64, device=device)
        squares = torch.zeros(3 if details else 2, clients, dtype=torch.float64, device=device)
        for layer, columns in column_chunks(self._layers, clients, device):
            shape = (clients, columns.stop - columns.start, self._type)
            old, target = self._current[:, columns], self._other[:, columns]
            base = old
            if momentum:
                base = self._scratch.take("base", *shape)
                torch.sub(old, target, out=base).mul_(momentum).add_(old)
            residual = self._residual_of(base, columns)
            change = row_combinations(across[layer], base, self._scratch.take("change", *shape))
            change.addcmul_(residual, towards, value=-1)
            torch.add(base, change, out=target)
            grams[0, layer] += self_product(target)
            if details:
                torch.sub(target, old, out=change)
                residual = self._residual_of(target, columns)
                grams[1, layer] += self_product(change)
            squares[0] += row_squares(residual)
            squares[1] += row_squares(change)
            if details:
                if self._mask is not None:
                    zero_gaps(change, self._mask[:, columns])
                squares[2] += row_squares(change)
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

    def _residual_of(self, psi: Tensor, columns: slice) -> Tensor:
        """Return M * (Psi - X_r) for a chunk of Psi (less the shared row)."""
        residual = self._scratch.take("residual", psi.shape[0], psi.shape[1], self._type)
        torch.sub(psi, self._received[:, columns], out=residual)
        residual += self._shared[columns]
        if self._mask is not None:
            zero_gaps(residual, self._mask[:, columns])
        return residual

    def propose_filtered(self, smooth: Array, weights: Array) -> Moments:
        """See `Signals`; by conjugate gradients in every column."""
        device, clients = self._shared.device, len(weights)
        L = torch.from_numpy(smooth).to(device)
        z = torch.from_numpy(weights).to(device)
        inverse = torch.linalg.inv(torch.diag(z) + L)
        grams = torch.zeros(len(self._layers), clients, clients, dtype=torch.float64, device=device)
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for layer, columns in column_chunks(self._layers, 8 * clients, device):
            old = self._current[:, columns].to(torch.float64)
            shared = self._shared[columns].to(torch.float64)
            received = self._received[:, columns].to(torch.float64) - shared
            arrived = torch.ones_like(received, dtype=torch.bool) if self._mask is None else self._mask[:, columns]
            received = torch.where(arrived, received, 0)
            new = solve_columns(L[layer], inverse[layer], z[:, None], arrived, received, old)
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
        for _, columns in column_chunks(self._layers, len(self._received), self._shared.device):
            residual = self._residual_of(self._current[:, columns], columns)
            total += row_squares(residual) @ self._weights
        return float(self._reduce(total))

    def models(self) -> Tensor:
        """Return Psi, (K, d), dtype and device of `received`."""
        self._current += self._shared
        return self._current.to(self._received.dtype)

"""What a solver sees of the models: a few numbers a step. How the K x d models are held is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jgesr_lightning.graph.gram import chunk_columns
from jgesr_lightning.graph.prox import Array

Reduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over the processes that hold the other columns (identity when there is only one)."""


@dataclass(frozen=True)
class Moments:
    """What one proposed step did, summed over columns and processes. G graphs: one, or one a layer.

    Attributes:
        distances: D(Psi+), (G, K, K).
        step_sq: ||Psi+ - Psi||_F^2.
        residual: ||M * Psi+ - Xr||_Z^2 over what arrived, or None where that was not worth computing.
        last_residual: the same for Psi, or None where `residual` had already been given for it.
        step_distances: D(Psi+ - Psi), (G, K, K), where details were asked for.
        step_residual: ||M * (Psi+ - Psi)||_Z^2, where details were asked for.
    """

    distances: Array
    step_sq: float
    residual: float | None = None
    last_residual: float | None = None
    step_distances: Array | None = None
    step_residual: float | None = None


@dataclass(frozen=True)
class Start:
    """Where the iteration starts.

    Attributes:
        cosines: of the rows of Psi_0, (G, K, K).
        distances: D(Psi_0), (G, K, K).
        residual: ||M * Psi_0 - Xr||_Z^2, or None where it is not known yet.
        scale: ||Psi_0||_F + ||Xr||_F: the size of the numbers at hand.
    """

    cosines: Array
    distances: Array
    residual: float | None
    scale: float


class Signals(Protocol):
    """The models Psi (K x d) during a solve: a current iterate, the one before it, and a proposed one.

    Every number that leaves is summed over processes, so that all of them decide alike.
    """

    def start(self) -> Start:
        """Go to Psi_0 and return what is to be known of it; ValueError where the data are not finite."""

    def propose(
        self, pull: Array, smooth: Array, momentum: float = 0.0, *, details: bool = False
    ) -> Callable[[], Moments]:
        """Compute Psi+ = Y - diag(pull) M * (Y - Xr) - smooth Y at Y = Psi + momentum (Psi - Psi_before).

        `pull` is (K,), `smooth` is (G, K, K). What is returned waits for the numbers: on an accelerator the host can
        work until it calls it.
        """

    def propose_filtered(self, smooth: Array, weights: Array) -> Moments:
        """Compute Psi+ = argmin ||M * (Psi - Xr)||_Z^2 + tr(Psi' smooth Psi), Z = diag(weights), smooth (G, K, K)."""

    def accept(self) -> None:
        """Make the proposed iterate the current one."""

    def residual(self) -> float:
        """Return ||M * Psi - Xr||_Z^2 of the current iterate."""

    def models(self) -> Tensor:
        """Return Psi, (K, d), own memory; the last call."""


def column_chunks(layers: Sequence[int], rows: int, device: torch.device) -> Iterator[tuple[int, slice]]:
    """Yield (layer, columns) for chunks of at most as many columns as `rows` rows in float64 make handy on `device`."""
    chunk, begin = chunk_columns(rows, device), 0
    for layer, width in enumerate(layers):
        for start in range(begin, begin + width, chunk):
            yield layer, slice(start, min(start + chunk, begin + width))
        begin += width


def work_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type the models are computed in: float64 for float64, float32 for all narrower ones."""
    return torch.promote_types(tensor.dtype, torch.float32)


def to_host(tensor: Tensor) -> Array:
    """Return a float64 numpy array: the one synchronisation of a step."""
    array: Array = tensor.to("cpu", torch.float64).numpy()
    return array

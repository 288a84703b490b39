"""What arrived at the server, with its gaps and what fills them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jgesr_lightning.solvers.signals import work_dtype


@dataclass(frozen=True)
class Uplink:
    """Entries that did not arrive start from `previous`; else from the weighted mean of those who delivered; else zero.

    What `received` holds where nothing arrived is never used.

    Attributes:
        received: X_r, (K, d); read, never modified.
        weights: diagonal of Z, (K,) float64 on the same device.
        mask: M, (K, d) bool, True where an entry arrived; None: everywhere.
        previous: (K, d) models for the entries that did not arrive, or None.
        start: Psi_0, (K, d), or None to start from what arrived.
    """

    received: Tensor
    weights: Tensor
    mask: Tensor | None = None
    previous: Tensor | None = None
    start: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type the models are computed in."""
        return work_dtype(self.received)

    def take(self, columns: Tensor) -> Uplink:
        """Return those columns alone, as copies."""
        parts = {name: getattr(self, name) for name in ("received", "mask", "previous", "start")}
        return replace(
            self, **{name: part.index_select(1, columns) for name, part in parts.items() if part is not None}
        )

    def filled(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return (what arrived, gaps filled; what arrived, zero elsewhere) of some columns, in the type of `dtype`."""
        raw = self.received[:, columns].to(self.dtype)
        if self.mask is None:
            return raw, raw
        mask = self.mask[:, columns]
        arrived = torch.where(mask, raw, 0)
        if self.previous is not None:
            filler = self.previous[:, columns].to(self.dtype)
        else:
            shares = self.weights[:, None].to(self.dtype) * mask
            total = shares.sum(0)
            filler = torch.where(total > 0, (shares * arrived).sum(0) / total, 0)
        return torch.where(mask, raw, filler), arrived

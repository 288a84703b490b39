"""How long the cells to come will take, from what finished ones of their kind took."""

from __future__ import annotations

from collections.abc import Hashable

from jgesr_lightning.config import to_dict
from jgesr_lightning.identity import digest, protocol
from jgesr_lightning.study.cells import Cell


class Estimate:
    """Seconds of finished cells, by kind.

    What a cell takes hangs on its data first, then on all settings that a table's methods share (how much data, how
    many rounds), then on its method: the finest kind of which any has finished tells.
    """

    def __init__(self) -> None:
        self._taken: dict[Hashable, list[float]] = {}
        self._noted: set[str] = set()
        self._kinds: dict[str, tuple[Hashable, ...]] = {}

    def note(self, cell: Cell, seconds: float) -> None:
        """Take note of what a finished cell took, once."""
        if cell.name not in self._noted:
            self._noted.add(cell.name)
            for kind in self.kinds(cell):
                self._taken.setdefault(kind, []).append(seconds)

    def of(self, cell: Cell) -> float:
        """Return what a cell will take; nothing, where no cell has finished yet."""
        known = next((self._taken[kind] for kind in self.kinds(cell) if kind in self._taken), [0.0])
        return sum(known) / len(known)

    def kinds(self, cell: Cell) -> tuple[Hashable, ...]:
        """Return a cell's kinds, the finest first; they are worked out once."""
        if cell.name not in self._kinds:
            shared = digest(protocol(to_dict(cell.config)), 32)
            data, method = cell.config.data.name, cell.config.aggregator.name
            self._kinds[cell.name] = ((data, shared, method), (data, shared), (data, method), (data,), ())
        return self._kinds[cell.name]

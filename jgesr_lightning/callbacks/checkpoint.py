"""Saves the federation after rounds, and when it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jgesr_lightning.federation import Federation, FederationState, Stopwatch
from jgesr_lightning.records import RoundRecord
from jgesr_lightning.runtime import checkpoint


class Checkpoint:
    """Writes a checkpoint every so many rounds, after the last one, and on a stop; each process calls it.

    Args:
        root: the run's ``checkpoint`` folder.
        every: rounds between checkpoints.
        config: resolved configuration, kept with the state.
    """

    def __init__(self, root: Path, every: int, config: dict[str, Any]) -> None:
        self.root = root
        self.every = every
        self.config = config
        self._saved = -1

    def on_federation_start(self, federation: Federation, state: FederationState) -> None:
        """Note what is saved already."""
        if state.records:
            self._saved = state.round

    def on_round_end(
        self, federation: Federation, state: FederationState, record: RoundRecord, watch: Stopwatch
    ) -> None:
        """Save when due."""
        if record.round > 0 and (record.round % self.every == 0 or record.round == federation.rounds):
            with watch.part("checkpoint"):
                self.save(federation, state)

    def on_federation_end(self, federation: Federation, state: FederationState, status: str) -> None:
        """Save what a stop would lose."""
        self.save(federation, state)

    def save(self, federation: Federation, state: FederationState) -> None:
        """Save `state` unless the newest checkpoint is of its round."""
        if state.round != self._saved:
            checkpoint.save(self.root, state, federation.aggregator.state(), self.config, federation.sharding)
            self._saved = state.round

"""Saves the federation after rounds, and when it stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.method_state import StateError, gathered
from jgesr_lightning.timing import Stopwatch


class Checkpoint:
    """Writes a checkpoint every so many rounds, after the last one, and on a stop; each process calls it.

    Args:
        root: the run's ``checkpoint`` folder.
        every: rounds between checkpoints.
        config: resolved configuration, kept with the state.
        keep_trained: whether the clients' own models after the last round's training are kept too, which doubles the
            size of the checkpoint.
        code: hashes of the files of parts of somebody's own, see `names.code_of`.
    """

    def __init__(
        self,
        root: Path,
        every: int,
        config: dict[str, Any],
        keep_trained: bool = True,
        code: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root
        self.every = every
        self.config = config
        self.keep_trained = keep_trained
        self.code = dict(code or {})
        self._saved = -1
        self._trained: Tensor | None = None

    def on_federation_start(self, plan: RoundPlan, state: FederationState) -> None:
        """Note what is saved already; save at once where a run goes on from the checkpoint of another one."""
        if not state.records:
            return
        if plan.sharding.any(not checkpoint.folder_of(self.root, state.round).is_dir()):
            self._trained = state.own if self.keep_trained else None
            self.save(plan, state)
        else:
            self._saved = state.round

    def on_round_end(self, plan: RoundPlan, state: FederationState, record: RoundRecord, watch: Stopwatch) -> None:
        """Save when due."""
        due = record.round > 0 and plan.is_due(record.round, self.every)
        if record.round > 0 and self.keep_trained:
            # a copy where it will be needed only after a later round has begun
            self._trained = plan.collector.trained if due else plan.collector.trained.clone()
        if due:
            with watch.part("checkpoint"):
                self.save(plan, state)

    def on_federation_end(self, plan: RoundPlan, state: FederationState, status: str) -> None:
        """Save what a stop would lose."""
        self.save(plan, state)

    def save(self, plan: RoundPlan, state: FederationState) -> None:
        """Save `state` unless the newest checkpoint is of its round."""
        if state.round == self._saved:
            return
        # where clients go on from their own models, the next round needs them
        trained = state.own if plan.aggregator.start == "own" else self._trained
        try:
            of_method = gathered(plan.aggregator, plan.sharding)
        except StateError as error:
            place = checkpoint.folder_of(self.root, state.round)
            raise checkpoint.CheckpointError(f"could not write the checkpoint {place}: {error}") from None
        checkpoint.save(self.root, state, of_method, self.config, plan.sharding, trained, self.code)
        self._saved = state.round

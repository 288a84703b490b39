"""How far the run is and how long it will take: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from torch import Tensor
from tqdm import tqdm

from jgesr_lightning.federation import Federation, FederationState, Stopwatch
from jgesr_lightning.records import RoundRecord
from jgesr_lightning.runtime.files import say


class Progress:
    """Shows rounds, clients within a round, accuracies and the time left; on rank zero only.

    The bar advances by the training samples of this process's clients, not by clients: the largest client may hold
    fifty times the smallest.
    """

    def __init__(self) -> None:
        self.active = False
        self.bar: Any = None
        self._work: list[float] = []
        self._start = 0.0
        self._first = 0
        self._rounds = 0

    def on_federation_start(self, federation: Federation, state: FederationState) -> None:
        """Open the bar."""
        self.active = federation.fabric.is_global_zero
        self._work = federation.weights.tolist()
        self._start, self._first, self._rounds = time.perf_counter(), state.round, federation.rounds
        if self.active and sys.stderr is not None and sys.stderr.isatty():
            own = sum(self._work[client] for client in federation.sharding.clients)
            left = (federation.rounds - state.round) * federation.participation * own
            shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left{postfix}"
            self.bar = tqdm(total=left, bar_format=shape, dynamic_ncols=True)
            self.bar.set_description(f"round {state.round}/{federation.rounds}")

    def on_round_start(self, round_number: int, sent: Tensor) -> None:
        """Name the round."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.set_description(f"round {round_number}/{self._rounds}")

    def on_client_delivered(self, row: int, client: int, model: Tensor) -> None:
        """Advance by the client's work."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.update(self._work[client])

    def on_round_end(
        self, federation: Federation, state: FederationState, record: RoundRecord, watch: Stopwatch
    ) -> None:
        """Print the round's line, and after the first one when the run should end."""
        if not self.active:
            return
        elapsed = time.perf_counter() - self._start
        done = record.round - self._first
        line = f"round {record.round}/{federation.rounds}  {_accuracies(record)}"
        if record.round > self._first and done > 0:
            left = elapsed / done * (federation.rounds - record.round)
            line += f"  {elapsed:.0f} s elapsed, {_duration(left)} left"
            if done == 1 and left > 0:
                line += f" (ends about {time.strftime('%H:%M', time.localtime(time.time() + left))})"
        if record.info.get("dropped_clients"):
            line += f"  not finite, left out: clients {record.info['dropped_clients']}"
        if record.info.get("reason") == "diverged":
            line += "  the solver diverged, what was sent is worthless: aggregator.step=backtracking helps"
        self._print(line)

    def on_federation_end(self, federation: Federation, state: FederationState, status: str) -> None:
        """Close the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
            self.bar = None

    def _print(self, line: str) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.write(line, file=sys.stderr)
        else:
            say(line)


def _accuracies(record: RoundRecord) -> str:
    parts = [
        f"{what} {100 * record.metrics[f'accuracy/{what}']:.2f} %"
        for what in ("received", "trained")
        if f"accuracy/{what}" in record.metrics
    ]
    return "accuracy " + ", ".join(parts) if parts else "not evaluated"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

"""How far the run is and how long it will take: a bar on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from tqdm import tqdm

from jgesr_lightning.files import say
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.timing import Stopwatch, duration


class Progress:
    """Shows rounds, clients within a round, accuracies and the time left; on rank zero only.

    The bar advances by the training samples of this process's clients, not by clients: the largest client may hold
    fifty times the smallest.
    """

    def __init__(self) -> None:
        self.active = False
        self.bar: Any = None
        self._above = contextlib.ExitStack()
        self._notebook = False
        self._work: list[float] = []
        self._start = 0.0
        self._first = 0
        self._rounds = 0

    def on_federation_start(self, plan: RoundPlan, state: FederationState) -> None:
        """Open the bar."""
        self.active = plan.fabric.is_global_zero
        self._work = plan.weights.tolist()
        self._start, self._first, self._rounds = 0.0, state.round, plan.rounds
        self._notebook = _in_notebook()
        if self.active and sys.stderr is not None and (self._notebook or sys.stderr.isatty()):
            own = set(plan.sharding.clients)
            coming = (plan.participants(number) for number in range(state.round + 1, plan.rounds + 1))
            left = sum(self._work[client] for drawn in coming for client in drawn if client in own)
            shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left{postfix}"
            self.bar = tqdm(total=left, bar_format=shape, dynamic_ncols=True)
            self.bar.set_description(f"round {state.round}/{plan.rounds}")
            self._above.enter_context(_logged_above())

    def on_round_start(self, round_number: int, sent: Tensor) -> None:
        """Name the round; the first one starts the clock: what comes before would be counted for every round."""
        began, self._start = self._start, self._start or time.perf_counter()
        if self.bar is not None:
            with contextlib.suppress(OSError):
                if not began:
                    self.bar.reset()
                self.bar.set_description(f"round {round_number}/{self._rounds}")

    def on_client_delivered(self, row: int, client: int, model: Tensor) -> None:
        """Advance by the client's work."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.update(self._work[client])

    def on_round_end(self, plan: RoundPlan, state: FederationState, record: RoundRecord, watch: Stopwatch) -> None:
        """Print the round's line, and after the first one when the run should end."""
        if not self.active:
            return
        elapsed = time.perf_counter() - self._start if self._start else 0.0
        done = record.round - self._first
        line = f"round {record.round}/{plan.rounds}  {_accuracies(record)}"
        if record.round > self._first and done > 0:
            left = elapsed / done * (plan.rounds - record.round)
            line += f"  {elapsed:.0f} s elapsed, {duration(left)} left"
            if done == 1 and left > 0:
                line += f" (ends about {time.strftime('%H:%M', time.localtime(time.time() + left))})"
        if record.info.get("dropped_clients"):
            line += f"  not finite, left out: clients {record.info['dropped_clients']}"
        if record.info.get("reason") == "diverged":
            line += "  the solver diverged, what was sent is worthless: aggregator.step=backtracking helps"
        self._print(line)

    def on_federation_end(self, plan: RoundPlan, state: FederationState, status: str) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Take the bar away, so that what is said next begins a line; again does nothing."""
        self._above.close()
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
            self.bar = None

    def _print(self, line: str) -> None:
        if self.bar is not None and self._notebook:  # a line a round would fill the page
            with contextlib.suppress(OSError):
                self.bar.set_postfix_str(line.partition("  ")[2])
        else:
            say(line)


class _Above(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextlib.contextmanager
def _logged_above() -> Iterator[None]:
    """Context in which warnings, logged or of Python's kind, go above the bar, unless logging was set up otherwise."""
    if logging.root.handlers:
        yield
        return
    handler, showing = _Above(logging.WARNING), warnings.showwarning
    logging.root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        if warnings.showwarning is not showing:  # else they had been captured before
            logging.captureWarnings(False)
        logging.root.removeHandler(handler)


def _in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this; a program may have imported ipykernel without being one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return "IPKernelApp" in getattr(shell, "config", ())


def _accuracies(record: RoundRecord) -> str:
    parts = [
        f"{what} {100 * record.metrics[f'accuracy/{what}']:.2f} %"
        for what in ("received", "trained")
        if f"accuracy/{what}" in record.metrics
    ]
    return "accuracy " + ", ".join(parts) if parts else "not evaluated"

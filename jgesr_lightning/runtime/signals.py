"""A request to stop: signals that ask for an end set a flag that the round loop reads at its safe points.

These are SIGTERM, Ctrl-C, SIGUSR1 and SIGUSR2, which job scripts and submitit send before a time limit, and SIGHUP of a
terminal that goes away. What is ignored stays so: SIGHUP under nohup, Ctrl-C of what a script runs in the background.

A process of the run that this one has started is told of a signal; one that has ended is a reason to stop, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
started: list[subprocess.Popen[bytes]] = []
"""The processes that this one has started and is connected with, for good: those of a later run are the same."""


class StopRequest:
    """Context in which stop signals are noted instead of ending the process; a second Ctrl-C stops at once.

    Outside the main thread no handler can be installed, and the context does nothing.

    Args:
        acknowledgement: what whoever presses Ctrl-C at a terminal is told at once; empty: nothing.

    Attributes:
        received: name of the first signal, or None.
    """

    def __init__(self, acknowledgement: str = "") -> None:
        self.acknowledgement = acknowledgement
        self.received: str | None = None
        self._former: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        # what is lost is noticed by talking to it, which comes after
        return self.received is not None or any(child.poll() is not None for child in started)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) in (None, signal.SIG_IGN):  # None: not Python's, and not to be given back
                    continue
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former.clear()

    def reason(self, status: str) -> str:
        """Return why a run ended with `status`: a signal that came too late to stop it is no reason."""
        return self.received or "" if status == "stopped" else ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self.acknowledgement and os.isatty(2):
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self.acknowledgement}\n".encode())  # print could meet itself half-way
        if self.received is None:
            self.received = signal.Signals(number).name
            for child in started:  # else they would train their whole round, and this process wait for them
                child.terminate()

"""Where the processes of a run find each other: a small key-value store that the first one holds.

The calls of ``torch.distributed`` that wait for other processes hear no signal until they return. Here processes wait
by looking again and again, so that the first signal ends it, and so does a process that is gone; collectives begin only
when everybody is there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from jgesr_lightning.runtime.environment import HERE, OURSELVES, TORCHRUN, Seat
from jgesr_lightning.runtime.signals import StopRequest

MEET_SECONDS = 120.0
"""Time without another process coming after which the others stop waiting."""
HERE_STAGE, READY_STAGE = "here", "ready"
LOOK_SECONDS = 0.05
ANSWER_SECONDS = 10.0


class MeetingError(ConnectionError):
    """The processes of a run did not come together; the message says which, where and why."""


class Meeting:
    """The connection of one process to the store through which the processes of its run find each other.

    Args:
        seat: place of this process.
        world_size: number of processes.
        stop: a request to stop, which ends all waiting.
    """

    def __init__(self, seat: Seat, world_size: int, stop: StopRequest) -> None:
        self.seat = seat
        self.world_size = world_size
        self.stop = stop
        self.address = seat.address or HERE
        self.port = seat.port or 0
        opened = self._host() if self._hosts() else self._join()
        # an agent of torchrun keeps its store when it starts its processes again
        self.store: Store = PrefixStore(f"jgesr/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", opened)

    @property
    def place(self) -> str:
        """Where the processes meet, for messages."""
        return f"{self.address}:{self.port}"

    def _hosts(self) -> bool:
        agent = self.seat.launcher == TORCHRUN and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self.seat.rank == 0 and not agent

    def _host(self) -> Store:
        try:
            listener = listen(self.seat)
        except OSError as error:
            raise MeetingError(f"{taken(self.seat)} ({error.strerror})") from error
        self.port = listener.getsockname()[1]
        return TCPStore(
            self.address if self.seat.launcher != OURSELVES else HERE,
            self.port,
            self.world_size,
            is_master=True,
            timeout=timedelta(seconds=MEET_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _join(self) -> Store:
        end = time.monotonic() + MEET_SECONDS
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=1.0).close()
                break
            except (OSError, UnicodeError) as error:  # not there yet, or never
                if time.monotonic() > end:
                    raise MeetingError(
                        f"the first process cannot be reached at {self.place} ({error}); "
                        f"check MASTER_ADDR and MASTER_PORT, and that process's own log"
                    ) from error
            self._look(lambda: "")
        try:
            return TCPStore(
                self.address,
                self.port,
                self.world_size,
                is_master=False,
                timeout=timedelta(seconds=ANSWER_SECONDS),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise MeetingError(f"what answers at {self.place} is no run of this program; set MASTER_PORT") from error

    def wait(self, stage: str, seconds: float, lost: Callable[[], str] = lambda: "") -> None:
        """Say that this process has come to `stage`, and wait until all have.

        Args:
            stage: a name, each used once.
            seconds: how long to wait after the last one came.
            lost: says which process is gone for good, or "".

        Raises:
            MeetingError: somebody did not come, or is gone.
            KeyboardInterrupt: Ctrl-C.
        """
        try:
            self.store.set(f"{stage}/{self.seat.rank}", "here")
            came, end = self.store.add(stage, 1), time.monotonic() + seconds
            while (now := self.store.add(stage, 0)) < self.world_size:
                if now > came:
                    came, end = now, time.monotonic() + seconds
                if time.monotonic() > end:
                    absent = [r for r in range(self.world_size) if not self.store.check([f"{stage}/{r}"])]
                    raise MeetingError(
                        f"process {', '.join(map(str, absent))} of {self.world_size} did not come to {self.place} "
                        f"within {seconds:g} s; its own log may say why"
                    )
                self._look(lost)
        except RuntimeError as error:
            raise MeetingError(f"lost the process that holds the meeting at {self.place}") from error

    def _look(self, lost: Callable[[], str]) -> None:
        if self.stop.received == "SIGINT":
            raise KeyboardInterrupt
        if self.stop.received:
            raise MeetingError(f"stopped by {self.stop.received} while the processes of the run were starting")
        gone = lost()
        if gone:
            raise MeetingError(gone)
        time.sleep(LOOK_SECONDS)


def listen(seat: Seat) -> socket.socket:
    """Return a socket that listens where the first process is to be found; only this machine can reach it if it may.

    Raises:
        OSError: the port is taken, or may not be had.
    """
    if seat.launcher == OURSELVES:
        return socket.create_server((HERE, seat.port or 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", seat.port or 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", seat.port or 0))


def taken(seat: Seat) -> str:
    """Return what to say of a port that cannot be had."""
    if seat.launcher == OURSELVES:
        return f"MASTER_PORT is {seat.port}, which cannot be had here; unset it, and a free port is found"
    return f"port {seat.port}, where the processes are to meet, cannot be had on this machine; set MASTER_PORT"


_current: Meeting | None = None


def meet(seat: Seat, world_size: int, stop: StopRequest) -> Meeting:
    """Return this process's meeting; made at the first call, as a process belongs to one run's group for good.

    Raises:
        MeetingError: the port cannot be had, or the first process cannot be reached.
        KeyboardInterrupt: Ctrl-C.
    """
    global _current
    if _current is None:
        _current = Meeting(seat, world_size, stop)
    _current.stop = stop
    return _current

"""How long things take: seconds of each part of a round, and lengths of time in words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Stopwatch:
    """Seconds spent in each named part of a round.

    Args:
        device: its work is waited for, so that it counts where it was done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed block."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def duration(seconds: float) -> str:
    """Return a length of time in two units at most.

    >>> duration(42.4), duration(187), duration(7260)
    ('42 s', '3 min 7 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

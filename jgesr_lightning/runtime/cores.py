"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those it may run on, or a container's share if less.

    A container that may use two cores' time (``docker run --cpus=2``, limits of Kubernetes) still sees every core of
    its machine, and one process for each of them would wait more than it works.

    Args:
        root: where the files of the system lie.
    """
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([ours, *map(math.ceil, _shares(root))]))


def _shares(root: Path) -> Iterator[float]:
    """Yield the shares of the control groups that this process is in, in cores (Linux, cgroup-v2 and cgroup-v1)."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if not group or "cpu" not in (controllers or "cpu").split(","):
            continue
        place = mounted / controllers if controllers else mounted
        inner = Path(group.lstrip("/"))
        for folder in (place / inner, *(place / above for above in inner.parents)):  # the whole machine's comes last
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            pair = " ".join(_text(folder / name) for name in names).split()
            if len(pair) == 2 and all(text.isdigit() and int(text) for text in pair):  # "max" and -1: no limit
                yield int(pair[0]) / int(pair[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # another system, or none of our business
        return ""

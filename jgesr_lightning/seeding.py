"""One random generator per (seed, purpose, round, client), and algorithms that repeat their bits.

Results depend on neither order nor number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

INIT = "initial model"
PARTITION = "partition"
BATCHES = "batches"
CHANNEL = "channel"
DOWNLINK = "downlink"
PARTICIPATION = "participation"
DROPOUT = "dropout"
SUBSET = "subset"
AGGREGATION = "aggregation"

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS takes another algorithm where streams share its memory


def derive(seed: int, purpose: str, round_number: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed that depends on all four arguments and on nothing else.

    A cryptographic hash spreads neighbouring keys over the whole range, so that no two streams overlap in practice
    (arithmetic such as ``seed + client`` makes client 1 of seed 0 and client 0 of seed 1 the same stream).
    """
    key = f"{int(seed)}|{purpose}|{int(round_number)}|{int(client)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, round_number: int = 0, client: int = 0) -> torch.Generator:
    """Return a CPU generator for one purpose, round and client; the same numbers on every device and process."""
    return torch.Generator().manual_seed(derive(seed, purpose, round_number, client))


@contextlib.contextmanager
def drawing_from(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch (on `device`, too), and what else somebody's code may draw from, and give all back as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what others draw from
    with torch.random.fork_rng([] if device is None or device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let the libraries take the algorithms that repeat their bits, where wanted, and leave them as they were after."""
    if not wanted:
        yield
        return
    filling, cudnn = torch.utils.deterministic, torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory, cudnn.benchmark  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    os.environ[_WORKSPACE] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    # filling fresh memory guards against reading it uninitialised, which nothing here does; it costs a pass a tensor
    filling.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cudnn.benchmark = False
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace
        torch.set_deterministic_debug_mode(before[0])
        filling.fill_uninitialized_memory, cudnn.benchmark = before[1:]  # type: ignore[attr-defined]

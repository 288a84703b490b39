"""Reads the records of a W&B offline file: LevelDB's log format, after a header of seven bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the protocol-buffer records of a ``.wandb`` file, in order."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # too short for a header: padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""

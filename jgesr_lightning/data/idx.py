"""The idx format in which MNIST is published: a header of big-endian whole numbers, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.data.dataset import DataError


def read_idx(path: Path, dims: int) -> Tensor:
    """Return the unsigned bytes in an idx file (plain or .gz) as a uint8 tensor with `dims` dimensions.

    Raises:
        DataError: the file is no such idx file, or is cut off or too long.

    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or unreadable ({error}); remove it or put a good copy there") from error
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes([0, 0, 8, dims]):
        raise DataError(f"{path} is damaged: not an idx file of bytes in {dims} dimensions; put a good copy there")
    shape = struct.unpack(f">{dims}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} is damaged: {len(content) - start} bytes of data where its header says {math.prod(shape)}; "
            "remove it or put a good copy there"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def to_idx(array: np.ndarray) -> bytes:
    """Return a uint8 array as the content of an idx file."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()

"""The idx format in which MNIST is published: a header of big-endian whole numbers, then the bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.data import published
from jgesr_lightning.data.archive import read_file
from jgesr_lightning.data.dataset import DataError

LIMIT = 1 << 30  # bytes; the largest set of this layout, EMNIST, has 547 MB of images
PUBLISHED_LIMIT = 60_000 * 28 * 28 + 16  # MNIST's largest file


def read_idx(path: Path, dims: int, md5: str | None = None) -> Tensor:
    """Return the unsigned bytes in an idx file (plain or .gz) as a uint8 tensor with `dims` dimensions.

    Args:
        path: the file.
        dims: number of dimensions that it must have.
        md5: the sum that its unpacked content must have; None: any will do.

    Raises:
        DataError: the file is no such idx file, is empty, cut off or too long, or not the one with that sum.

    """
    content = read_file(path, LIMIT if md5 is None else PUBLISHED_LIMIT)
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes([0, 0, 8, dims]):
        raise DataError(f"{path} is damaged: not an idx file of bytes in {dims} dimensions; put a good copy there")
    shape = struct.unpack(f">{dims}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} is damaged: {len(content) - start} bytes of data where its header says {math.prod(shape)}; "
            "remove it or put a good copy there"
        )
    if math.prod(shape) == 0:
        raise DataError(f"{path} is damaged: its header says {' x '.join(map(str, shape))}, which is nothing")
    if md5 is not None:
        published.check_file(path, content, md5)
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def to_idx(array: np.ndarray) -> bytes:
    """Return a uint8 array as the content of an idx file."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()

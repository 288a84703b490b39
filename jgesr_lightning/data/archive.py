"""Compressed archives, read whole so that damage anywhere in them is noticed."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from pathlib import Path

from jgesr_lightning.data.dataset import DataError


def read_tgz(path: Path) -> dict[str, memoryview]:
    """Return the content of every file in a .tar.gz archive by its name, in the archive's order.

    The whole stream is decompressed first, which checks its length and checksum: read entry by entry, tarfile takes a
    broken header for the end of the archive and says nothing.

    Raises:
        DataError: the archive is damaged.

    """
    try:
        with gzip.open(path) as stream:
            content = stream.read()
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            places = [(entry.name, entry.offset_data, entry.size) for entry in archive if entry.isfile()]
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it or put a good copy there") from error
    return {name: memoryview(content)[start : start + size] for name, start, size in places}

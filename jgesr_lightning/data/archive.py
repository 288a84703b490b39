"""Compressed files, read whole so that damage anywhere in them is noticed, and never beyond what they can hold."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import IO, cast

from jgesr_lightning.data.dataset import DataError

CHUNK = 1 << 20


class _Entry(tarfile.TarInfo):
    """An entry whose header cannot send the reader back to where it has been, as a negative size would."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError("an entry of negative size")
        return cast(int, super()._block(count))  # type: ignore[misc]


def read_tgz(path: Path, limit: int, entries: int) -> dict[str, memoryview]:
    """Return the content of every regular file in a .tar.gz archive by its name, in the archive's order.

    The whole stream is decompressed first, which checks its length and checksum: read entry by entry, tarfile takes a
    broken header for the end of the archive and says nothing.

    Args:
        path: the archive.
        limit: most bytes that it may hold, decompressed.
        entries: most files and folders that it may hold.

    Raises:
        DataError: the archive is damaged, or holds more than that.

    """
    try:
        with gzip.open(path) as stream:
            buffer = read_bounded(path, cast(IO[bytes], stream), limit)
        content, places = buffer.getbuffer(), []
        with tarfile.open(fileobj=buffer, mode="r:", tarinfo=_Entry) as archive:
            for number, entry in enumerate(archive):
                if number >= entries:
                    raise DataError(f"{path} holds more than {entries:,} files; it is another archive")
                if not entry.isreg() or entry.issparse():
                    continue
                if entry.size < 0 or entry.offset_data + entry.size > len(content):
                    raise tarfile.ReadError(f"{entry.name} lies outside the archive")
                places.append((entry.name, entry.offset_data, entry.size))
    except DataError:
        raise
    except Exception as error:  # a damaged archive can fail in any way, down to RecursionError
        raise DataError(f"{path} is damaged ({error}); remove it or put a good copy there") from error
    return {name: content[start : start + size] for name, start, size in places}


def read_bounded(path: Path, stream: IO[bytes], limit: int) -> io.BytesIO:
    """Return all of a stream; the file `path` that it comes from is only named.

    Raises:
        DataError: it holds more than `limit` bytes; no more than that is kept in memory.

    """
    buffer = io.BytesIO()
    while chunk := stream.read(CHUNK):
        if buffer.tell() + len(chunk) > limit:
            raise DataError(
                f"{path} holds more than {limit:,} bytes, all that its data set needs; put a good copy there"
            )
        buffer.write(chunk)
    buffer.seek(0)
    return buffer


def read_file(path: Path, limit: int) -> memoryview:
    """Return the content of a file, decompressed where its name ends in .gz, of at most `limit` bytes.

    Raises:
        DataError: it is damaged, unreadable or longer.

    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return read_bounded(path, cast(IO[bytes], stream), limit).getbuffer()
    except DataError:
        raise
    except Exception as error:  # gzip, too, fails in many ways
        raise DataError(f"{path} is damaged or unreadable ({error}); remove it or put a good copy there") from error

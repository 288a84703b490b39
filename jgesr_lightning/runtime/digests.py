"""Digests of the files of a folder, by which a flipped bit is told from what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from jgesr_lightning.files import write_atomically, write_text

NAME = "digests.json"


class DigestError(ValueError):
    """A file is not what was written; the message names it."""


def write_hashed(path: Path, write: Callable[[IO[bytes]], object]) -> str:
    """Write a file atomically and return the SHA-256 of what was written, in hexadecimal.

    Raises:
        OSError: the file could not be written.
    """
    digest = hashlib.sha256()
    write_atomically(path, lambda file: write(_Hashing(file, digest)))  # type: ignore[arg-type]
    return digest.hexdigest()


class _Hashing:
    """A file whose writes also go into a digest; `torch.save` writes from the first byte to the last."""

    def __init__(self, file: IO[bytes], digest: hashlib._Hash) -> None:
        self._file = file
        self._digest = digest

    def write(self, content: bytes) -> int:
        """Write `content`."""
        self._digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Keep the digests of a folder's files, by their names, beside them."""
    write_text(folder / NAME, json.dumps({"sha256": dict(sorted(digests.items()))}, indent=1))


def read_digests(folder: Path) -> dict[str, str] | None:
    """Return the digests of a folder's files, or None where none were kept.

    Raises:
        DigestError: their file is damaged.
        OSError: it cannot be read.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(path.read_bytes())
        digests = content["sha256"]
        if not all(isinstance(text, str) for pair in digests.items() for text in pair):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DigestError(f"{path} is damaged") from error
    found: dict[str, str] = digests
    return found


def check_digest(path: Path, digests: Mapping[str, str] | None) -> None:
    """Raise DigestError unless a file is what was written; OSError where it cannot be read."""
    if digests is None:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if digests.get(path.name) != found:
        raise DigestError(f"{path} is damaged (its digest is not that of what was written)")

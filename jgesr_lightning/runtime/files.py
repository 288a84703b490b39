"""Files that are either whole or not there, and the folder of a run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file through a temporary one beside it: flushed to disk, then renamed over `path`.

    A crash or a full disk leaves the former file as it was.

    Raises:
        OSError: the file could not be written; the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    """Tell the user a line; a terminal or a pipe that has gone away is no reason to stop a run."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


class InUseError(RuntimeError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made if need be); the system lets go of it if the process dies.

    Some network file systems have no locks: there a line says so, and nothing is held.

    Raises:
        InUseError: somebody else holds it; nothing waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InUseError(file.read().strip()) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): make sure that no other run uses the same folder", path, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def move_aside(folder: Path) -> Path:
    """Rename `folder` to the first free name of the form ``folder.1``, ``folder.2``, ... and return that."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside

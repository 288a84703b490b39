"""Files that are either whole or not there, locks on them, and what is said of disks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from tqdm import tqdm

logger = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems answer that have no locks."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file through a temporary one beside it: flushed to disk, then renamed over `path`.

    A crash or a full disk leaves the former file as it was.

    Raises:
        OSError: the file could not be written; the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # containers share numbers of processes
    try:
        with naming(path), open(temporary, "xb") as file:
            noted = _Noted(file)
            try:
                write(noted)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise noted.error or error from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which an error that names no file names `path`: no write knows what it writes to."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class _Noted:
    """A file that notes why a write failed: PyTorch's writer tells of a line of its own source instead."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write, as the file does."""
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def remedy(error: BaseException | None) -> str:
    """Return what would do against an error that nothing could be written for."""
    return f"{'make room' if no_room(error) else 'put that right'}, then go on with resume=auto"


def no_room(error: BaseException | None) -> bool:
    """Whether an error says that a disk is full, or that this user's share of it is."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file of that content atomically."""
    write_atomically(path, lambda file: file.write(content))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems flush files alone
            raise
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    """Tell the user a line, above a bar that is shown; a terminal that has gone away is no reason to stop a run."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()


HOLDER = "process "
"""How the line in a lock file begins that says who holds it."""


class InUseError(RuntimeError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Hold an exclusive lock on the file `path` (made if need be); the system lets go of it if the process dies.

    Yields the lock's descriptor: a process that inherits it holds the lock, too. Some network file systems have no
    locks: there a line says so, nothing is held, and the descriptor is None. A symbolic link is never followed, and a
    file that holds anything but the name of a former holder is left as it is.

    Raises:
        InUseError: somebody else holds it; nothing waits.
        OSError: the file cannot be opened for writing, or is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor: int | None = None

    def acquired(opened: int) -> None:
        nonlocal descriptor
        descriptor = opened
        if os.pread(opened, len(HOLDER), 0) in (b"", HOLDER.encode()):
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{HOLDER}{os.getpid()} on {socket.gethostname()}".encode(), 0)

    # the file stays when the lock is let go: whoever waits for its removal could lock a name that is gone
    lock = FileLock(path, timeout=0, preserve_lock_file=True, on_acquired=acquired)
    try:
        lock.acquire()
    except Timeout:
        raise InUseError(_holder(path)) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link, which a lock must not be; remove it") from None
        if error.errno not in WITHOUT_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): make sure that no other run uses the same folder", path, error)
    try:
        yield descriptor
    finally:
        lock.release()


def held_since(path: Path) -> float | None:
    """Return the time at which whoever holds the lock `path` took it, or None where nobody does, or none can tell.

    A free lock is held for that, but as one of many who may share it: a process that wants it in that instant alone
    would take it for held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(descriptor).st_mtime  # who takes it writes its name into it
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    """Return what a lock file says of who holds it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, errors="replace") as file:
            text = file.read(200).strip()
        if text.startswith(HOLDER):
            return text
    return "another process"


def move_aside(folder: Path) -> Path:
    """Rename `folder` to the first free name of the form ``folder.1``, ``folder.2``, ... and return that."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside

"""What becomes of a run that fails: its summary says why, and whoever started it is told in one line."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.config import Config, ConfigError
from jgesr_lightning.federation import NonFiniteError
from jgesr_lightning.files import no_room, remedy, say, write_text
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.rendezvous import MeetingError
from jgesr_lightning.runtime.sharding import PeerLostError

TRACEBACK = "traceback.txt"
"""Where the first process writes what nobody foresaw; process 2 of a run writes traceback.2.txt."""
_OTHERS = "traceback.*.txt"
FORESEEN = (checkpoint.CheckpointError, MeetingError, ConfigError)


class RunError(RuntimeError):
    """Something that nobody foresaw ended a run that had begun; the message is one line.

    Args:
        reason: what, and what is saved.
        where: file that has the traceback; None where none could be written.
    """

    def __init__(self, reason: str, where: Path | None = None) -> None:
        super().__init__(reason if where is None else f"{reason}; where it happened: {where}")
        self.where = where


def account(error: BaseException, config: Config, folder: Path, files: ResultFiles | None, rank: int) -> NoReturn:
    """Write into the run's folder that it failed, and why; then raise what whoever started it is to be told.

    Args:
        error: what ended the run.
        config: its configuration.
        folder: its folder.
        files: who writes the summary; None on all processes but the first.
        rank: which process this is.
    """
    if isinstance(error, NonFiniteError):
        reason = f"{error}; {_saved(folder)}"
        raised: BaseException = NonFiniteError(reason)
    elif isinstance(error, PeerLostError):
        reason = "; ".join([str(error), *_of_others(folder), _saved(folder)])
        raised = PeerLostError(reason)
    elif isinstance(error, FORESEEN):
        reason, raised = str(error), error
    elif isinstance(error, OSError) and (no_room(error) or _is_of(folder, error.filename)):
        what_next = remedy(error) if folder.is_dir() else "the folder is gone"
        reason = f"could not write the results in {folder}: {error}; {what_next}"
        raised = OSError(reason)
    elif isinstance(error, (Exception, SystemExit)):  # SystemExit: a method of somebody's own called sys.exit
        reason = f"{describe(error)}; {_saved(folder)}"
        path = folder / (TRACEBACK if files is not None else f"traceback.{rank}.txt")
        raised = RunError(reason, path if _kept(path, error) else None)
    else:
        reason, raised = "interrupted", error
        if files is not None and checkpoint.newest(folder / "checkpoint"):
            say(_saved(folder))
    if files is not None and folder.is_dir():
        try:
            files.write_failure(config.rounds, reason, unless_finished=isinstance(error, checkpoint.CheckpointError))
        except OSError as second:  # the disk may be full; the failure itself is on its way to the user
            say(f"summary.json could not be written: {second}")
    if raised is error:
        raise error
    raise raised from error


def account_for_lost(reason: str, config: Config, folder: Path, files: ResultFiles) -> None:
    """Write into the run's folder that another process was lost, where this one cannot come to account for it."""
    lost = f"lost another process of this run ({reason}); {_saved(folder)}"
    files.write_failure(config.rounds, lost, unless_finished=True)


def describe(error: BaseException) -> str:
    """Return an unforeseen error in one line, with what helps where that is known."""
    lines = str(error).strip().splitlines() or [""]
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in lines[0]:
        return f"out of memory ({lines[0].split('. ')[0]}); a smaller local.batch_size or more devices may help"
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def _is_of(folder: Path, filename: object) -> bool:
    """Whether a file that an error names is one of the run's: a part of somebody's own reads and writes others."""
    if not isinstance(filename, str | bytes | os.PathLike):
        return False
    return Path(os.fsdecode(filename)).is_relative_to(folder)


def _saved(folder: Path) -> str:
    newest = checkpoint.newest(folder / "checkpoint")
    return f"the last checkpoint is {newest} (resume=auto goes on from there)" if newest else "no round was saved"


def forget(folder: Path) -> None:
    """Remove what the processes of an earlier attempt wrote of their end."""
    for path in (folder / TRACEBACK, *folder.glob(_OTHERS)):
        with contextlib.suppress(OSError):
            path.unlink()


def _of_others(folder: Path) -> Iterator[str]:
    """Yield what other processes of this run wrote of their end: its last line, and where the rest is."""
    for path in sorted(folder.glob(_OTHERS)):
        with contextlib.suppress(OSError, IndexError):
            last = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            yield f"process {path.name.split('.')[1]}: {last}; where it happened: {path}"


def _kept(path: Path, error: BaseException) -> bool:
    try:
        write_text(path, "".join(traceback.format_exception(error)))
    except OSError:
        return False
    return True

"""What becomes of a run that fails: its summary says why, and whoever started it is told in one line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NoReturn

from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.config import Config, ConfigError
from jgesr_lightning.federation import NonFiniteError
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.files import remedy, say, write_text
from jgesr_lightning.runtime.rendezvous import MeetingError
from jgesr_lightning.runtime.sharding import PeerLostError

TRACEBACK = "traceback.txt"
FORESEEN = (checkpoint.CheckpointError, PeerLostError, MeetingError, ConfigError)


class RunError(RuntimeError):
    """Something that nobody foresaw ended a run that had begun; the message is one line."""


def account(error: BaseException, config: Config, folder: Path, files: ResultFiles | None) -> NoReturn:
    """Write into the run's folder that it failed, and why; then raise what whoever started it is to be told.

    Args:
        error: what ended the run.
        config: its configuration.
        folder: its folder.
        files: who writes the summary; None on the processes that write nothing.
    """
    if isinstance(error, NonFiniteError):
        reason = f"{error}; {_saved(folder)}"
        raised: BaseException = NonFiniteError(reason)
    elif isinstance(error, FORESEEN):
        reason, raised = str(error), error
    elif isinstance(error, OSError):
        what_next = remedy(error) if folder.is_dir() else "the folder is gone"
        reason = f"could not write the results in {folder}: {error}; {what_next}"
        raised = OSError(reason)
    elif isinstance(error, Exception):
        reason = f"{describe(error)}; {_saved(folder)}"
        raised = RunError(reason)
        if files is not None and _kept(folder / TRACEBACK, error):
            raised = RunError(f"{reason}; where it happened: {folder / TRACEBACK}")
    else:
        reason, raised = "interrupted", error
    if files is not None and folder.is_dir():
        try:
            files.write_failure(config.rounds, reason, refused=isinstance(error, checkpoint.CheckpointError))
        except OSError as second:  # the disk may be full; the failure itself is on its way to the user
            say(f"summary.json could not be written: {second}")
    if raised is error:
        raise error
    raise raised from error


def describe(error: BaseException) -> str:
    """Return an unforeseen error in one line, with what helps where that is known."""
    lines = str(error).strip().splitlines() or [""]
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in lines[0]:
        return f"out of memory ({lines[0].split('. ')[0]}); a smaller local.batch_size or more devices may help"
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def _saved(folder: Path) -> str:
    newest = checkpoint.newest(folder / "checkpoint")
    return f"the last checkpoint is {newest} (resume=auto goes on from there)" if newest else "no round was saved"


def _kept(path: Path, error: BaseException) -> bool:
    try:
        write_text(path, "".join(traceback.format_exception(error)))
    except OSError:
        return False
    return True

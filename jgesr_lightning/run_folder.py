"""The folder of a run: where it is, whose it is while the run lasts, and what a run that goes on finds in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgesr_lightning.config import Config, ConfigError, completed, load_config, to_dict, to_yaml
from jgesr_lightning.files import InUseError, locked, move_aside, say, write_text
from jgesr_lightning.identity import NO_INFLUENCE, flatten, relocated
from jgesr_lightning.names import code_of
from jgesr_lightning.paths import user_path
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.summary import DamagedSummaryError, data_digest, read_summary

METHOD = "aggregator.name"

LAXER = {"nonfinite": ("raise", "drop", "drop_all")}
"""Settings that may become laxer: what the stricter value would have stopped at, it has, and all else is the same."""


@dataclass(frozen=True)
class Opening:
    """What the first process found when it opened the run's folder, for all processes.

    Attributes:
        source: checkpoint to go on from, or None.
        finished: whether there is nothing left to do.
        refusal: why the run cannot be, or an empty string.
        digest: of its data, which all processes must have alike.
    """

    source: Path | None = None
    finished: bool = False
    refusal: str = ""
    digest: str = ""


def run_folder(config: Config) -> Path:
    """Return the run's folder; under a W&B sweep agent, whose runs share one configuration, the run's id is added."""
    own = f"-{os.environ['WANDB_RUN_ID']}" if os.environ.get("WANDB_RUN_ID") else ""
    if os.environ.get("WANDB_SWEEP_ID") and not config.name.endswith(own):  # else it is the file of such a run
        return config.folder.with_name(config.folder.name + own)
    return config.folder


def where_it_lies(config: Config, file: str, arguments: Iterable[str]) -> Config:
    """Return the configuration of a run that goes on with the ``config.yaml`` in its own folder, wherever that is now.

    The folder may have been moved, or kept aside as NAME.1, since the file was written.

    Args:
        config: what the file and the arguments say.
        file: the file.
        arguments: those of the command line; a name or output_dir among them holds.

    Raises:
        ConfigError: the folder has a name that no run's can have.
    """
    path = user_path(file).absolute()
    folder = path.parent
    given = any(argument.removeprefix("--").startswith(("name=", "output_dir=")) for argument in arguments)
    if config.resume != "auto" or given or path.name != "config.yaml" or not _is_a_runs(folder):
        return config
    if os.path.realpath(folder) == os.path.realpath(config.folder):
        return config
    try:
        return config.replace(name=folder.name, output_dir=str(folder.parent))
    except ConfigError as error:
        raise ConfigError(f"the run in {folder} cannot go on there: {error}; rename the folder") from None


def _is_a_runs(folder: Path) -> bool:
    """Whether a run has written into a folder: somebody's own may have a `checkpoint` beside a ``config.yaml``, too."""
    try:
        return checkpoint.newest(folder / "checkpoint") is not None or bool(read_summary(folder))
    except DamagedSummaryError:
        return False


def open_folder(config: Config, folder: Path, held: ExitStack, data_digest: str = "") -> Opening:
    """Lock the run's folder for as long as `held` lasts, and make it ready; refusals are returned, not raised.

    A run goes on only with the data that it began with, as far as `data_digest` tells ("": anything will do).
    """
    try:
        locks = _locks(folder)
        if not all(lock.exists() for lock in locks):  # which a refusal should not make, nor their folders
            _resumable(config, folder, data_digest)
        for lock in locks:
            held.enter_context(locked(lock))
        resumed = _resumable(config, folder, data_digest)
        if resumed is None and config.resume == "auto":
            say(f"resume=auto: there is no checkpoint in {folder}; starting anew")
        if resumed is not None:
            for reason in resumed.passed_over:
                say(f"{reason.split('; ')[0]}: passed over, {resumed.folder} is used")
            if resumed.shared["round"] == config.rounds and _is_finished(folder, resumed.folder):
                return Opening(finished=True)
        _prepare(config, folder, resumed)
    except InUseError as error:
        return Opening(refusal=f"{folder} is in use by another run ({error}); choose another name=")
    except ConfigError as error:
        return Opening(refusal=str(error))
    except OSError as error:
        place = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        why = f"{error.strerror or error}{place}"
        return Opening(refusal=f"{folder} cannot be made or written ({why}); choose another output_dir= or name=")
    return Opening(None if resumed is None else resumed.folder, digest=data_digest)


def _locks(folder: Path) -> list[Path]:
    """Return the locks of a run's folder: where it really is, and, where it is a link itself, the link's own."""
    places = {Path(os.path.realpath(folder)), Path(os.path.realpath(folder.parent), folder.name)}
    return sorted(place.with_name(f".{place.name}.lock") for place in places)


def _resumable(config: Config, folder: Path, data_digest: str) -> checkpoint.Found | None:
    """Return the checkpoint to go on from, or None to start anew."""
    if config.resume is None:
        return None
    source = folder if config.resume == "auto" else user_path(config.resume)
    try:
        found = checkpoint.find(source / "checkpoint") or checkpoint.find(source)
        if found is None and (source / checkpoint.STATE).is_file():
            found = checkpoint.Found(source, checkpoint.check(source))
    except checkpoint.CheckpointError as error:
        raise ConfigError(error) from error
    if found is None:
        if config.resume == "auto":
            _check_unsaved(config, folder)
            return None
        raise ConfigError(f"resume is {config.resume!r}, but there is no checkpoint in it")
    _check_same(found.shared["config"], config, found.folder)
    _check_data(found.folder, data_digest)
    if found.shared["round"] > config.rounds:
        raise ConfigError(f"rounds is {config.rounds}, but {found.folder} has had {found.shared['round']} already")
    return found


def _check_unsaved(config: Config, folder: Path) -> None:
    """Raise ConfigError where a run of other settings began in `folder` but saved nothing yet."""
    if (folder / "config.yaml").is_file():
        try:
            former = to_dict(load_config(folder / "config.yaml"))
        except ConfigError:  # as where its parts were files that have moved since: nothing is lost by beginning again
            return
        _check_same(former, config, folder)


def _check_same(former: dict[str, Any], config: Config, where: Path) -> None:
    present = to_dict(config)
    differing = _differences(completed(relocated(former, present)), present)
    if differing:
        raise ConfigError(
            f"{where} was written with other settings ({'; '.join(differing)}); "
            f"use the same ones, or choose another name= and leave out resume"
        )


def _check_data(found: Path, digest: str) -> None:
    """Raise ConfigError where the summary beside the checkpoint `found` tells of other data."""
    try:
        former = data_digest(read_summary(found.parent.parent))
    except DamagedSummaryError:  # it does not say
        return
    if digest and former and former != digest:
        raise ConfigError(
            f"{found} was written with other data, or data shared out otherwise; put them back, or choose "
            "another name= and leave out resume"
        )


def changed_code(former: object, config: Mapping[str, Any]) -> list[str]:
    """Return the files of parts of somebody's own that are others by now than in `former`, what a run says of them."""
    if not isinstance(former, dict):  # it does not say
        return []
    flat, present = flatten(config), code_of(config)
    return [str(flat[key]) for key in sorted(former.keys() & present.keys()) if former[key] != present[key]]


def _differences(former: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return the keys that differ, with both values, save those that a resumed run may change."""
    old, new = flatten(former), flatten(present)
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if METHOD in keys:  # which has settings of its own
        keys = [key for key in keys if key == METHOD or not key.startswith("aggregator.")]
    free = tuple(f"{key}." for key in (*NO_INFLUENCE, "rounds"))
    laxer = {
        key for key, order in LAXER.items()
        if {old.get(key), new.get(key)} <= set(order) and order.index(old[key]) < order.index(new[key])
    }  # fmt: skip
    changed = [key for key in keys if not f"{key}.".startswith(free) and key not in laxer]
    return [f"{key} was {_typed(old.get(key))}, is {_typed(new.get(key))}" for key in changed]


def _typed(value: object) -> str:
    """Return a value as it is typed on the command line: text bare, null rather than None."""
    return value if isinstance(value, str) else json.dumps(value)


def _is_finished(folder: Path, found: Path) -> bool:
    """Whether the checkpoint `found` is this folder's and its run said that it had ended."""
    try:
        status = read_summary(folder).get("status")
    except DamagedSummaryError:  # written anew, from the checkpoint
        return False
    return status == "finished" and _lies_in(found, folder)


def _prepare(config: Config, folder: Path, resumed: checkpoint.Found | None) -> None:
    """Make the run's folder; a former run that is not to be continued is kept beside it."""
    # with nothing saved, resume=auto begins again where it left off: at the start, in the same folder
    continued = config.resume == "auto" or (resumed is not None and _lies_in(resumed.folder, folder))
    if not continued and any((folder / name).exists() for name in ("config.yaml", "summary.json", "checkpoint")):
        aside = move_aside(folder)
        say(f"{folder} held a run already; it is kept as {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", to_yaml(config.replace(name=folder.name, resume=None)))


def _lies_in(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents

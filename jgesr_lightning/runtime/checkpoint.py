"""Checkpoints: all that the next round needs, whole or not there, readable without pickles and on any device.

A checkpoint is a folder ``round_00005``: ``state.pt`` (rank zero: aggregator state, records, graphs, configuration), a
``models_<rank>.pt`` of each process (its clients' rows), so that no process gathers the whole matrix, and the digests
of these. It is written under a temporary name, flushed, and renamed; the one before it is kept, should this one turn
out to be damaged. It may be read with another number of processes.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.files import move_aside, remedy, sync_folder
from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.runtime import contents, digests
from jgesr_lightning.runtime.sharding import Sharding

SCHEMA = 1
STATE = "state.pt"
OURS = re.compile(r"\.?(state\.pt|models_\d{5,}\.pt|digests\.json)(\.[0-9a-f]+\.tmp)?")
"""Names of the files that this program writes into a checkpoint; nothing else is ever removed."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what to do."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read and found whole.

    Attributes:
        folder: where it lies.
        shared: everything but the models.
        passed_over: one line for each newer checkpoint that could not be used.
    """

    folder: Path
    shared: dict[str, Any]
    passed_over: tuple[str, ...] = ()


def folder_of(root: Path, round_number: int) -> Path:
    """Return where the checkpoint of a round lies under the run's ``checkpoint`` folder."""
    return root / f"round_{round_number:05d}"


def models_file(folder: Path, rank: int) -> Path:
    """Return where a process's rows lie in a checkpoint."""
    return folder / f"models_{rank:05d}.pt"


def newest(root: Path) -> Path | None:
    """Return the checkpoint of the latest round under `root`, damaged or not, or None."""
    return next(iter(_by_age(root)), None)


def find(root: Path) -> Found | None:
    """Return the newest checkpoint under `root` that is whole, or None where there is none at all.

    Raises:
        CheckpointError: there are some, but none can be used; the message is that of the newest.
    """
    errors: list[CheckpointError] = []
    for folder in _by_age(root):
        try:
            return Found(folder, check(folder), tuple(str(error) for error in errors))
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return None


def check(folder: Path) -> dict[str, Any]:
    """Read all of a checkpoint, and return what all processes share of it.

    Raises:
        CheckpointError: it is damaged, incomplete, or does not hold what it should.
    """
    shared = read_shared(folder)
    for _ in _parts(folder, shared):
        pass
    return shared


def _by_age(root: Path) -> list[Path]:
    """Return the checkpoints under `root`, newest first."""
    with contextlib.suppress(OSError):
        folders = [entry for entry in root.iterdir() if re.fullmatch(r"round_\d{5,9}", entry.name) and entry.is_dir()]
        return sorted(folders, key=_round_of, reverse=True)
    return []


def _round_of(folder: Path) -> int:
    return int(folder.name.removeprefix("round_"))


def save(
    root: Path,
    state: FederationState,
    aggregator_state: dict[str, Any],
    config: dict[str, Any],
    sharding: Sharding,
    trained: Tensor | None = None,
    code: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint of `state`; to be called by every process. The one before it is kept, older ones are removed.

    Args:
        root: the run's ``checkpoint`` folder.
        state: what was reached.
        aggregator_state: plain containers and tensors.
        config: the resolved configuration.
        sharding: who holds which rows.
        trained: (clients of this process, d) what they held after the round's local training; kept where given.
        code: hashes of the files of parts of somebody's own.

    Returns:
        Its folder.

    Raises:
        CheckpointError: a process could not write, or the aggregator's state is of a kind that could not be read back;
            the former checkpoints are kept.
    """
    final = folder_of(root, state.round)
    if odd := contents.of_method(aggregator_state):
        raise CheckpointError(
            f"could not write the checkpoint {final}: the method's {odd}; it must hold numbers, texts, tensors, None, "
            "and lists and tables of them"
        )
    partial = root / f".{final.name}.partial"
    failure: Exception | None = None
    if sharding.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            for rest in root.glob(".round_*.partial"):  # of runs that were killed
                _remove(rest)
            partial.mkdir(exist_ok=True)
        except OSError as error:
            failure = error
    sharding.barrier()
    digest = "00" * 32
    try:
        if failure is None:
            rows = {"clients": list(sharding.clients), "models": state.models.cpu()}
            further = zip(contents.FURTHER, (trained, state.believed), strict=True)
            rows |= {name: matrix.cpu() for name, matrix in further if matrix is not None}
            digest = digests.write_hashed(models_file(partial, sharding.rank), lambda file: torch.save(rows, file))
            if sharding.rank == 0:
                shared = _shared(state, aggregator_state, config, sharding) | {"code": dict(code or {})}
                of_state = digests.write_hashed(partial / STATE, lambda file: torch.save(shared, file))
    except (OSError, RuntimeError) as error:
        failure = error
    everyones = _gather(digest, sharding)
    if sharding.rank == 0 and failure is None:
        try:
            of_models = {models_file(partial, rank).name: each for rank, each in enumerate(everyones)}
            digests.write_digests(partial, {STATE: of_state, **of_models})
        except OSError as error:
            failure = error
    if sharding.any(failure is not None):
        if sharding.rank == 0:
            _remove(partial)
        kept = newest(root)
        raise CheckpointError(
            f"could not write the checkpoint {final}: {failure or 'another process failed'}; "
            + (f"{kept} is kept: {remedy(failure)}" if kept else "there is none yet")
        )
    if sharding.rank == 0:
        _put_in_place(partial, final)
    sharding.barrier()
    return final


def _shared(
    state: FederationState, aggregator_state: dict[str, Any], config: dict[str, Any], sharding: Sharding
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "digests": True,
        "round": state.round,
        "num_clients": sharding.num_clients,
        "size": sharding.size,
        "world_size": sharding.world_size,
        "config": config,
        "aggregator": aggregator_state,
        "records": [asdict(record) for record in state.records],
        "graphs": state.graphs,
        "layer_graphs": state.layer_graphs,
    }


def _gather(digest: str, sharding: Sharding) -> list[str]:
    """Return every process's digest, by rank."""
    table = torch.zeros(sharding.world_size, 32, dtype=torch.float64)
    table[sharding.rank] = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.float64)
    return [bytes(map(int, row)).hex() for row in sharding.sum(table).tolist()]


def _put_in_place(partial: Path, final: Path) -> None:
    """Give a written checkpoint its name, and remove those that it replaces: all but the one before it."""
    root = final.parent
    if final.exists():
        _remove(final)
        if final.exists():  # somebody keeps files of his own in it
            move_aside(final)
    partial.rename(final)
    sync_folder(root)
    others = [folder for folder in _by_age(root) if folder != final]
    older = [folder for folder in others if _round_of(folder) < _round_of(final)]
    before = next((folder for folder in older if (folder / STATE).is_file()), None)
    for folder in others:
        if folder != before:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, and its folder unless somebody keeps other files in it."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if OURS.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
                path.unlink()
        folder.rmdir()


def _check_kind(path: Path) -> None:
    """Raise CheckpointError where `path` is something else than a file: a pipe would be waited for without end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file; remove {path.parent} and start anew without resume")


def _read(path: Path, known: dict[str, str] | None) -> dict[str, Any]:
    _check_kind(path)
    try:
        digests.check_digest(path, known)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that are refused here anyway
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete; start anew without resume") from error
    except digests.DigestError as error:
        raise CheckpointError(f"{error}; remove {path.parent} and start anew without resume") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); start anew without resume") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}); remove {path.parent} and start anew without resume"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no part of a checkpoint; start anew without resume")
    return content


def _digests(folder: Path) -> dict[str, str] | None:
    _check_kind(folder / digests.NAME)
    try:
        return digests.read_digests(folder)
    except (digests.DigestError, OSError) as error:
        raise CheckpointError(f"{error}; remove {folder} and start anew without resume") from error


def read_shared(folder: Path) -> dict[str, Any]:
    """Read what all processes share of a checkpoint: everything but the models.

    Raises:
        CheckpointError: not a checkpoint, damaged, of another schema, or of other content than it should have.
    """
    if not (folder / STATE).is_file():
        raise CheckpointError(f"{folder} holds no checkpoint (no {STATE} in it)")
    known = _digests(folder)
    shared = _read(folder / STATE, known)
    if shared.get("schema") != SCHEMA:
        raise CheckpointError(f"{folder} has schema {shared.get('schema')!r}, this program reads schema {SCHEMA}")
    wrong = contents.of_state(shared)
    if known is None and shared.get("digests"):
        wrong = f"has lost its {digests.NAME}"
    if wrong:
        raise CheckpointError(f"{folder / STATE} {wrong}; start anew without resume")
    return shared


def _parts(folder: Path, shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of each process that wrote the checkpoint, checked, and at last that no client is missing."""
    known = _digests(folder)
    missing = set(range(shared["num_clients"]))
    dtype = None
    for rank in range(shared["world_size"]):
        path = models_file(folder, rank)
        part = _read(path, known)
        wrong = contents.of_rows(part, shared["size"], missing, dtype)
        if wrong:
            raise CheckpointError(f"{path} does not hold the models it should ({wrong}); start anew without resume")
        dtype = part["models"].dtype
        missing -= set(part["clients"])
        yield part
    if missing:
        raise CheckpointError(f"{folder} lacks the models of clients {sorted(missing)}; start anew without resume")


def rows(found: Found) -> dict[str, Tensor]:
    """Return the (K, d) matrices of a checkpoint: "models" as in `FederationState`, and those of `FURTHER` it has.

    Raises:
        CheckpointError: damaged.
    """
    everyone = range(found.shared["num_clients"])
    return _rows_of(everyone, found.folder, found.shared, torch.device("cpu"))


def load(folder: Path, shared: dict[str, Any], sharding: Sharding, device: torch.device) -> FederationState:
    """Return the state that a checkpoint holds, with the rows of this process's clients.

    Args:
        folder: the checkpoint.
        shared: what `read_shared` returned for it.
        sharding: who holds which clients now; need not be as it was when the checkpoint was written.
        device: where the models go.

    Raises:
        CheckpointError: damaged, or for another number of clients or parameters.
    """
    expected = (sharding.num_clients, sharding.size)
    if (shared["num_clients"], shared["size"]) != expected:
        raise CheckpointError(
            f"{folder} has {shared['num_clients']} clients of {shared['size']} parameters; "
            f"this run has {expected[0]} of {expected[1]}"
        )
    found = _rows_of(sharding.clients, folder, shared, device)
    return FederationState(
        round=shared["round"],
        models=found["models"],
        own=found.get("trained"),
        believed=found.get("believed"),
        records=[RoundRecord(**record) for record in shared["records"]],
        graphs=shared["graphs"],
        layer_graphs=shared["layer_graphs"],
    )


def _rows_of(clients: Sequence[int], folder: Path, shared: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return (clients, d) of each matrix of a checkpoint, reading one process's rows at a time."""
    found: dict[str, Tensor] = {}
    place = {client: row for row, client in enumerate(clients)}
    for part in _parts(folder, shared):
        for name in ("models", *(name for name in contents.FURTHER if name in part)):
            empty = torch.empty(len(place), shared["size"], dtype=part[name].dtype, device=device)
            matrix = found.setdefault(name, empty)
            for client, row in zip(part["clients"], part[name], strict=True):
                if client in place:
                    matrix[place[client]] = row.to(device)
    return found

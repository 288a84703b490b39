"""Checkpoints: all that the next round needs, whole or not there, readable without pickles and on any device.

A checkpoint is a folder ``round_00005`` with ``state.pt`` (rank zero: aggregator state, records, graphs, configuration)
and one ``models_<rank>.pt`` a process (its clients' rows), so that no process gathers the whole matrix. It is written
under a temporary name, flushed, and renamed; only then is the former one removed. It may be read with another number
of processes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.records import RoundRecord
from jgesr_lightning.runtime.files import sync_folder, write_atomically
from jgesr_lightning.runtime.sharding import Sharding
from jgesr_lightning.state import FederationState

SCHEMA = 1
KEYS = {
    *("schema", "round", "num_clients", "size", "world_size"),
    *("config", "aggregator", "records", "graphs", "layer_graphs"),
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what to do."""


def folder_of(root: Path, round_number: int) -> Path:
    """Return where the checkpoint of a round lies under the run's ``checkpoint`` folder."""
    return root / f"round_{round_number:05d}"


def newest(root: Path) -> Path | None:
    """Return the newest whole checkpoint under `root`, or None."""
    if not root.is_dir():
        return None
    whole = sorted(entry for entry in root.iterdir() if re.fullmatch(r"round_\d{5,}", entry.name))
    return max(whole, key=lambda entry: int(entry.name.removeprefix("round_")), default=None)


def save(
    root: Path, state: FederationState, aggregator_state: dict[str, Any], config: dict[str, Any], sharding: Sharding
) -> Path:
    """Write a checkpoint of `state`; to be called by every process.

    Returns:
        Its folder, the only one under `root` afterwards.

    Raises:
        CheckpointError: a process could not write; the former checkpoint is kept.
    """
    final = folder_of(root, state.round)
    partial = root / f".{final.name}.partial"
    failure: Exception | None = None
    if sharding.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        except OSError as error:
            failure = error
    sharding.barrier()
    try:
        if failure is None:
            rows = {"clients": list(sharding.clients), "models": state.models.cpu()}
            write_atomically(partial / f"models_{sharding.rank:05d}.pt", lambda file: torch.save(rows, file))
            if sharding.rank == 0:
                shared = {
                    "schema": SCHEMA,
                    "round": state.round,
                    "num_clients": sharding.num_clients,
                    "size": sharding.size,
                    "world_size": sharding.world_size,
                    "config": config,
                    "aggregator": aggregator_state,
                    "records": [record.to_dict() for record in state.records],
                    "graphs": state.graphs,
                    "layer_graphs": state.layer_graphs,
                }
                write_atomically(partial / "state.pt", lambda file: torch.save(shared, file))
    except (OSError, RuntimeError) as error:  # a full disk reaches us as either, from torch.save
        failure = error
    if sharding.any(failure is not None):
        if sharding.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        kept = newest(root)
        raise CheckpointError(
            f"could not write the checkpoint {final}: {failure or 'another process failed'}; "
            + (f"{kept} is kept: make room, then go on with resume=auto" if kept else "there is none yet")
        )
    if sharding.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_folder(root)
        for entry in root.iterdir():
            if entry != final:
                shutil.rmtree(entry, ignore_errors=True)
    sharding.barrier()
    return final


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete; start anew without resume") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}); remove {path.parent} and start anew without resume"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no part of a checkpoint; start anew without resume")
    return content


def read_shared(folder: Path) -> dict[str, Any]:
    """Read what all processes share of a checkpoint: everything but the models.

    Raises:
        CheckpointError: not a checkpoint, damaged, or of another schema.
    """
    if not (folder / "state.pt").is_file():
        raise CheckpointError(f"{folder} holds no checkpoint (no state.pt in it)")
    shared = _read(folder / "state.pt")
    if shared.get("schema") != SCHEMA:
        raise CheckpointError(f"{folder} has schema {shared.get('schema')}, this program reads schema {SCHEMA}")
    missing = sorted(KEYS - shared.keys())
    if missing:
        raise CheckpointError(f"{folder / 'state.pt'} lacks {', '.join(missing)}; start anew without resume")
    return shared


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
    models: Tensor | None = None
    found = set()
    place = {client: row for row, client in enumerate(sharding.clients)}
    for rank in range(shared["world_size"]):
        path = folder / f"models_{rank:05d}.pt"
        part = _read(path)
        clients, rows = part.get("clients"), part.get("models")
        if not (isinstance(clients, list) and isinstance(rows, Tensor) and rows.shape == (len(clients), sharding.size)):
            raise CheckpointError(f"{path} does not hold the models it should; start anew without resume")
        if models is None:
            models = torch.empty(len(place), sharding.size, dtype=rows.dtype, device=device)
        for row, client in enumerate(clients):
            if client in place:
                models[place[client]] = rows[row].to(device)
                found.add(client)
    if models is None or found != set(place):
        raise CheckpointError(f"{folder} lacks the models of clients {sorted(set(place) - found)}")
    try:
        records = [RoundRecord(**record) for record in shared["records"]]
    except TypeError as error:
        raise CheckpointError(f"{folder} holds records of another kind; start anew without resume") from error
    return FederationState(
        round=shared["round"],
        models=models,
        records=records,
        graphs=shared["graphs"],
        layer_graphs=shared["layer_graphs"],
    )

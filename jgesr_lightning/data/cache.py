"""Decoded data sets kept on disk: one file a set, written whole or not at all, by one process while others wait."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from jgesr_lightning.data.dataset import RawDataset
from jgesr_lightning.files import WITHOUT_LOCKS, write_atomically
from jgesr_lightning.names import label
from jgesr_lightning.paths import cache_home, writable

log = logging.getLogger(__name__)

FORMAT = 3  # raise it when decoding changes: older files are then remade
WAIT_SECONDS = 600.0
TENSORS = ("train_inputs", "train_labels", "test_inputs", "test_labels", "mean", "std")
OPTIONAL = ("train_clients", "test_clients")


def source_key(name: str, root: Path, files: Sequence[Path]) -> str:
    """Return a key that changes with any of `files` (size, time of last change, place under `root`).

    Of a folder the time of its last change counts, which is when an entry was added, removed or renamed.
    """
    stats = [(os.path.relpath(file, root), file.stat()) for file in files]
    sizes = [(place, stat.st_size if Path(root, place).is_file() else 0, stat.st_mtime_ns) for place, stat in stats]
    return hashlib.sha256(json.dumps([FORMAT, name, sizes]).encode()).hexdigest()


def cache_paths(name: str, root: Path) -> list[Path]:
    """Return where the cache of a data set may lie: beside the data, else in the user's cache folder if known."""
    if re.fullmatch(r"[\w.-]+", name) is None:  # of a function that is somebody's: its file's path is part of the name
        word = re.sub(r"[^\w.-]", "_", label(name))
        name = f"{word}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    beside, home = root / ".cache" / f"{name}.pt", cache_home()
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return [beside] if home is None else [beside, home / "jgesr_lightning" / f"{name}-{place}.pt"]


def cached(name: str, root: Path, key: str, decode: Callable[[], RawDataset], beside: bool = True) -> RawDataset:
    """Return the cached data set if there is one for `key`, else decode it and keep it where there is a place.

    However many processes start at once, one decodes and the others read its file. Where no folder can be written,
    every process decodes for itself. Unless `beside`, nothing is put beside the data.
    """
    paths = cache_paths(name, root)[0 if beside else 1 :]
    for path in paths:
        if (dataset := read_cache(path, key)) is not None:
            return dataset
    dataset = None
    for path in paths:
        with contextlib.ExitStack() as held:
            if not writable(path.parent) or not held.enter_context(in_turn(path.with_suffix(".lock"))):
                continue
            if (kept := read_cache(path, key)) is not None:  # another process made it meanwhile
                return kept
            if dataset is None:
                log.warning("Decoding %s once; %s will keep the result", name, path)
                dataset = decode()
            try:
                write_cache(path, key, dataset)
            except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
                log.warning("Could not write the cache %s (%s); going on without it", path, error)
                continue
            return read_cache(path, key) or dataset
    if dataset is None:
        log.warning("No folder for a cache of %s can be written; decoding it at every start", name)
        dataset = decode()
    return dataset


def read_cache(path: Path, key: str) -> RawDataset | None:
    """Return what a cache file holds, mapped into memory, or None if it is missing, unreadable, damaged or outdated."""
    try:
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # another user's, most often: nothing is wrong with it
        log.warning("The cache %s may not be read (%s); trying the next place", path, error.strerror)
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content["key"] != key:
            return None
        tensors = {field: content[field] for field in (*TENSORS, *OPTIONAL) if field in content}
        if _checksum(tensors) != content["checksum"]:
            raise ValueError("its checksum differs")
        return RawDataset(
            name=str(content["name"]),
            classes=tuple(str(name) for name in content["classes"]),
            clients=tuple(str(name) for name in content["clients"]),
            left_out=str(content["left_out"]),
            features=tuple(str(name) for name in content.get("features", ())),  # files of before have none
            **tensors,
        )
    except Exception as error:  # a damaged file can fail in any way, and all of them mean: make it anew
        log.warning("The cache %s is damaged (%s); making it anew", path, " ".join(str(error).split())[:100])
        return None


def write_cache(path: Path, key: str, dataset: RawDataset) -> None:
    """Write a cache file, whole or not at all."""
    fields = {field: getattr(dataset, field) for field in (*TENSORS, *OPTIONAL)}
    tensors = {field: tensor.contiguous() for field, tensor in fields.items() if tensor is not None}
    content = {"key": key, "name": dataset.name, "left_out": dataset.left_out, "checksum": _checksum(tensors)}
    content |= {key: list(getattr(dataset, key)) for key in ("classes", "clients", "features")}
    for left_behind in path.parent.glob(f".{path.name}.*.tmp"):  # by a process that was killed; we hold the lock
        left_behind.unlink(missing_ok=True)
    write_atomically(path, lambda file: torch.save({**content, **tensors}, file))


@contextlib.contextmanager
def in_turn(path: Path, seconds: float = WAIT_SECONDS) -> Iterator[bool]:
    """Hold an exclusive lock between processes on the file `path`; False if it cannot be had within `seconds`.

    The lock goes with the process that holds it, however that ends; its file stays.
    """
    lock = FileLock(path, mode=0o666, preserve_lock_file=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("Waiting for another process (lock %s)", path)
            lock.acquire(timeout=seconds)
    except Timeout:
        log.warning("%s is still locked after %g s", path, seconds)
        yield False
    except OSError as error:
        yield error.errno in WITHOUT_LOCKS  # there renaming is still atomic
    else:
        try:
            yield True
        finally:
            lock.release()


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    checksum = 0
    for field, tensor in tensors.items():
        if not tensor.is_contiguous():  # a few bytes could stand for more than fits into memory
            raise ValueError(f"its {field} are spread out")
        content: Any = tensor.numpy()  # crc32 takes arrays, whatever its annotation says
        checksum = zlib.crc32(content, checksum)
    return checksum

"""Data of one's own, by kind: an image folder, one file of tensors, or a file a client; `data.root` names the place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jgesr_lightning.data.clientfiles import list_clients, read_clients
from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.folders import list_images, read_images
from jgesr_lightning.data.registry import Source
from jgesr_lightning.data.tables import READING
from jgesr_lightning.data.tensors import SUFFIXES, read_tensors

Listing = TypeVar("Listing")


def find_folder(root: Path, given: bool) -> Source:
    """Find images at `<class>/**` below the folder, or below its `train/` and `test/`."""
    _check("folder", "the folder with one folder of images a class", root, given)
    train, test, left_out = _listing(list_images, root)
    files = tuple(path for tree in (train, test or {}) for images in tree.values() for path in images)
    return Source(lambda: read_images("folder", root, train, test, left_out), files, left_out, beside=False)


def find_tensors(root: Path, given: bool) -> Source:
    """Find one .pt or .npz file: the one that is named, or the only one in the folder."""
    what = "the .pt or .npz file with x and y, or the folder that holds it"
    _check("tensors", what, root, given, file=True)
    path = root
    if os.path.isdir(root):
        found = sorted(p for p in root.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        if len(found) != 1:
            names = ", ".join(p.name for p in found)[:100] or "none"
            raise DataError(
                f"tensors: {root} must hold one .pt or .npz file and holds {names}; name the file in data.root"
            )
        path = found[0]
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        raise DataError(f"tensors: {path} must be a .pt or .npz file")
    return Source(lambda: read_tensors("tensors", path), (path,), beside=False)


def find_clients(root: Path, given: bool, label: str) -> Source:
    """Find one .pt, .npz or .csv file a client in the folder, or in its `train/` and `test/`."""
    _check("clients", "the folder with one .pt, .npz or .csv file a client", root, given)
    train, test, left_out = _listing(list_clients, root)
    files = (*train.values(), *test.values())
    settings = f", label {label!r}, tables {READING}, {left_out}"
    return Source(lambda: read_clients("clients", root, train, test, label, left_out), files, settings, beside=False)


def _listing(function: Callable[[Path], Listing], root: Path) -> Listing:
    try:
        return function(root)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be looked into ({error.strerror})") from error


def _check(name: str, what: str, root: Path, given: bool, file: bool = False) -> None:
    if not given:
        raise DataError(f"data.name={name} needs data.root: {what}")
    if not (os.path.exists(root) if file else os.path.isdir(root)):
        state = "is no folder" if os.path.lexists(root) else "does not exist"
        raise DataError(f"data.root is '{root}', which {state}; data.name={name} needs {what}")

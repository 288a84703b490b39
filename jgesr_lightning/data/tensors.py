"""Samples in one file, .pt or .npz: x and y and, where the data know of clients, `clients`; nothing is unpickled."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.registry import Source, check_place
from jgesr_lightning.data.samples import encode, inputs_of, labels_of

SUFFIXES = (".pt", ".npz")
ENTRIES = ("x", "y", "clients", "classes")
NPZ_LIMIT = 64 << 30  # bytes of all arrays together: a compressed file may claim any number


def find_tensors(root: Path, given: bool) -> Source:
    """Find one .pt or .npz file: the one that is named, or the only one in the folder."""
    what = "the .pt or .npz file with x and y, or the folder that holds it"
    check_place("tensors", what, root, given, file=True)
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
    return Source(lambda: _read(path), (path,), beside=False)


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a .npz file by their names, in the file's order.

    Raises:
        DataError: there is no such file, it is damaged, or an array holds Python objects, which would be unpickled.

    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > NPZ_LIMIT:
            raise DataError(f"{path} says that it holds {size:,} bytes, more than {NPZ_LIMIT:,}")
        with np.load(path, allow_pickle=False) as content:
            return {name: np.asarray(content[name]) for name in content.files}
    except DataError:
        raise
    except Exception as error:  # zip files and headers can be damaged in any way
        reason = " ".join(str(error).split())[:120]
        if "allow_pickle" in reason or "Object arrays" in reason:
            reason = "an array in it holds Python objects; save plain numbers or texts"
        raise DataError(f"{path} cannot be read as .npz ({reason or type(error).__name__})") from error


def read_entries(path: Path, needed: Sequence[str] = ("x", "y")) -> dict[str, Any]:
    """Return what a .pt or .npz file holds, by name; nothing but plain numbers, texts and containers is unpickled.

    Raises:
        DataError: it is no such file, is damaged, or lacks what is needed.

    """
    if path.suffix.lower() == ".npz":
        content: Any = read_npz(path)
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it cannot read it refuses
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # weights_only refuses in as many ways as there are
            reason = " ".join(str(error).split())
            if "weights_only" in reason or "WeightsUnpickler" in reason:
                reason = "it holds objects other than tensors, numbers, texts and containers, which are not unpickled"
            raise DataError(f"{path} cannot be read as .pt ({reason[:120]})") from error
    words = " and ".join(needed)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; it must hold a dictionary with {words}")
    missing = [name for name in needed if name not in content]
    if missing:
        found = ", ".join(map(str, content)) or "nothing"
        raise DataError(f"{path} holds {found[:100]}; it must hold {words} (and lacks {', '.join(missing)})")
    return {str(name): value for name, value in content.items()}


def _read(path: Path) -> RawDataset:
    """Return the data set in one .pt or .npz file.

    Its entries are x (see `samples.inputs_of`), y (whole numbers or, in .npz, texts), and, if given, `clients` (the
    client of each sample, a whole number or a text) and `classes` (what label 0, 1, ... is called).

    Raises:
        DataError: the file is damaged, or what it holds does not fit together.

    """
    entries = read_entries(path)
    inputs = inputs_of(path, entries["x"])
    names = _names(path, entries.get("classes"))
    classes, (labels,) = encode([(path, labels_of(path, entries["y"], len(inputs)))], names)
    optional: dict[str, Any] = {}
    if entries.get("clients") is not None:
        ids = labels_of(path, entries["clients"], len(inputs), "clients")
        optional["clients"], (optional["train_clients"],) = encode([(path, ids)], what="client")
    others = sorted(entries.keys() - set(ENTRIES))
    left_out = f"left out the entries {', '.join(others)[:100]}" if others else ""
    return make_dataset("tensors", (inputs, labels), None, classes, path, left_out=left_out, **optional)


def _names(path: Path, classes: Any) -> list[str] | None:
    """Return what the classes are called, or None where the file does not say."""
    if classes is None:
        return None
    listed = classes.tolist() if isinstance(classes, np.ndarray) else classes
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise DataError(f"{path}: classes is {str(classes)[:60]!r}; it must be a list of texts, one for each label")
    return list(listed)

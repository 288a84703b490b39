"""Clients' own files: one .pt, .npz or .csv file a client, in one folder, or in `train/` and `test/` alike."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from jgesr_lightning.data.dataset import DataError, RawDataset, described, make_dataset, summary_of
from jgesr_lightning.data.folders import beside
from jgesr_lightning.data.registry import Source, check_place, looking_into
from jgesr_lightning.data.samples import LabelArray, encode, inputs_of, labels_of
from jgesr_lightning.data.tables import READING, TABLE, as_labels, read_table
from jgesr_lightning.data.tensors import SUFFIXES, read_entries

Files = dict[str, Path]  # a client's name -> its file
KNOWN = (*SUFFIXES, TABLE)


def find_clients(root: Path, given: bool, label: str) -> Source:
    """Find one .pt, .npz or .csv file a client in the folder, or in its `train/` and `test/`.

    Clients are named by their files, without the ending, and numbered in the order of these files.

    Raises:
        DataError: there are no such files, two of one name, or a client has a part of two.

    """
    check_place("clients", "the folder with one .pt, .npz or .csv file a client", root, given)
    with looking_into(root):
        train, test, left_out = _list(root)
    files = (*train.values(), *test.values())
    settings = f", label {label!r}, tables {READING}, {left_out}"
    return Source(lambda: _read_all(root, train, test, label, left_out), files, settings, beside=False)


def _list(root: Path) -> tuple[Files, Files, str]:
    """Return each client's file of training samples, of test samples (none: to be split), and what was left out."""
    split = os.path.isdir(root / "train") and os.path.isdir(root / "test")
    left_out = beside(root) if split else []
    train = _files(root / "train" if split else root, root, left_out)
    test = _files(root / "test", root, left_out) if split else {}
    alone = sorted(train.keys() ^ test.keys()) if split else []
    if alone:
        has, lacks = ("train", "test") if alone[0] in train else ("test", "train")
        raise DataError(f"{root}: client {alone[0]} has a file in {has}/ and none in {lacks}/")
    return train, {client: test[client] for client in train if split}, summary_of(left_out)


def _read_all(root: Path, train: Files, test: Files, label: str, left_out: str) -> RawDataset:
    """Return the data set in clients' own files; each sample knows whose it is."""
    read = [(path, *_read(path, label)) for files in (train, test) for path in files.values()]
    first, columns, kind, _ = read[0]
    for path, own, inputs, _ in read:
        if own != columns:
            raise DataError(f"{path} has features {_listed(own)}, but {first} has {_listed(columns)}; they must agree")
        if inputs.shape[1:] != kind.shape[1:] or inputs.dtype != kind.dtype:
            found, wanted = described(inputs[0]), described(kind[0])
            raise DataError(f"{path} has x of {found} a sample, but {first} has {wanted}; they must agree")
    classes, labels = encode(_together([(path, own) for path, _, _, own in read]))
    K = len(train)
    trained = torch.cat(labels[:K]).unique()
    for (path, *_), tested in zip(read[K:], labels[K:], strict=True):
        new = tested[~torch.isin(tested, trained)]
        if len(new):
            raise DataError(f"{path} has samples of class {classes[int(new[0])]}, which no client has for training")

    def joined(part: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
        sizes = torch.tensor([len(own) for own in labels[part]])
        samples = torch.cat([inputs for _, _, inputs, _ in read[part]]), torch.cat(labels[part])
        return samples, torch.arange(K).repeat_interleave(sizes)

    samples, owners = joined(slice(K))
    test_samples, test_owners = joined(slice(K, None)) if test else (None, None)
    own_ids = {"clients": tuple(train), "train_clients": owners, "test_clients": test_owners}
    return make_dataset("clients", samples, test_samples, classes, root, left_out=left_out, features=columns, **own_ids)


def _files(folder: Path, root: Path, left_out: list[str]) -> Files:
    found: Files = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix.lower() not in KNOWN or not os.path.isfile(path):
            left_out.append(path.relative_to(root).as_posix())
        elif path.stem in found:
            raise DataError(f"{path} and {found[path.stem].name} would both be client {path.stem}; remove one")
        else:
            found[path.stem] = path
    if not found:
        raise DataError(f"{folder} holds no {', '.join(KNOWN)} files; it must hold one a client, or train/ and test/")
    return found


def _read(path: Path, label: str) -> tuple[tuple[str, ...], Tensor, LabelArray]:
    if path.suffix.lower() == TABLE:
        return read_table(path, label)
    entries = read_entries(path)
    inputs = inputs_of(path, entries["x"])
    return (), inputs, labels_of(path, entries["y"], len(inputs))


def _together(parts: list[tuple[Path, LabelArray]]) -> list[tuple[Path, LabelArray]]:
    """Return the labels of all files, those of tables as numbers where no file holds texts."""
    tables = [part for part in parts if part[0].suffix.lower() == TABLE]
    if any(labels.dtype.kind == "U" for path, labels in parts if path.suffix.lower() != TABLE):
        return parts
    numbers = dict(zip((path for path, _ in tables), as_labels(tables), strict=True))
    return [(path, numbers.get(path, labels)) for path, labels in parts]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)[:80] or "without names"

"""New data for trained models, read from files as the clients' data were."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jgesr_lightning.arguments import CommandParser
from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.data import DataError
from jgesr_lightning.data.dataset import printable
from jgesr_lightning.data.folders import FORMATS, class_tree, read_image
from jgesr_lightning.data.samples import LabelArray, inputs_of, labels_of
from jgesr_lightning.data.tables import TABLE, as_labels, read_table
from jgesr_lightning.data.tensors import read_entries

TENSORS = (".pt", ".npz")


@dataclass(frozen=True)
class Samples:
    """Samples of one file or folder, with their classes.

    Attributes:
        inputs: (n, *input_shape), bytes of images or float32.
        labels: (n,) int64 places among the classes.
    """

    inputs: Tensor
    labels: Tensor


def add_options(parser: CommandParser, otherwise: str = "") -> None:
    """Let a command take new data with labels.

    Args:
        parser: of the command.
        otherwise: what is taken where none are given; empty: they must be.
    """
    kinds = "folder of class folders of images, .pt or .npz with x and y, or .csv"
    default = f" (default: {otherwise})" if otherwise else ""
    parser.add_argument("--data", metavar="PATH", required=not otherwise, help=f"{kinds}{default}")
    parser.add_argument(
        "--label",
        help="name of the column of labels of a .csv file (default: that of the run's data; of an export, label)",
    )


def unlabelled(path: Path, shape: tuple[int, ...], features: Sequence[str] = ()) -> tuple[Tensor, list[str]]:
    """Read samples, (n, *shape), and a name for each: an image, a .pt or .npz file with x, or a .csv file of features.

    Args:
        path: the file.
        shape: of one sample, as the network takes it.
        features: what the clients' data call each feature, where they do: columns of tables are taken by these names.

    Raises:
        ConfigError: the file cannot be read, or holds samples of another shape, or other features.
    """
    _must_exist(path)
    try:
        suffix = path.suffix.lower()
        if suffix in FORMATS:
            return _image(path, shape), [str(path)]
        if suffix in TENSORS:
            inputs = inputs_of(path, read_entries(path, ["x"])["x"])
        elif suffix == TABLE:
            columns, values, _ = read_table(path, None, features)
            inputs = _in_order(path, columns, values, features)
        else:
            raise ConfigError(f"{path} is none of {', '.join([*FORMATS, *TENSORS, TABLE])}")
    except DataError as error:
        raise ConfigError(error) from None
    return _fitting(path, inputs, shape), [f"{path}:{row}" for row in range(len(inputs))]


def labelled(
    path: Path, shape: tuple[int, ...], classes: tuple[str, ...], label: str, features: Sequence[str] = ()
) -> Samples:
    """Read samples with their classes: a folder of one folder a class, a .pt or .npz file with x and y, or a table.

    Classes are told by their names, as a run keeps them (`printable`); in files of tensors by their numbers, too, where
    no class is called by a number.

    Args:
        path: the folder or file.
        shape: of one sample, as the network takes it.
        classes: name of each class.
        label: column of labels in tables.
        features: as for `unlabelled`.

    Raises:
        ConfigError: something cannot be read, has another shape, other features, or a class that the run does not know.
    """
    _must_exist(path)
    try:
        if path.is_dir():
            return _folder(path, shape, classes)
        suffix = path.suffix.lower()
        if suffix in TENSORS:
            entries = read_entries(path)
            inputs = _fitting(path, inputs_of(path, entries["x"]), shape)
            found: LabelArray = labels_of(path, entries["y"], len(inputs))
        elif suffix == TABLE:
            columns, values, found = read_table(path, label, features, option="--label")
            if not set(map(printable, found.tolist())) <= set(classes):
                (found,) = as_labels([(path, found)])
            inputs = _fitting(path, _in_order(path, columns, values, features), shape)
        else:
            kinds = ", ".join([*TENSORS, TABLE])
            raise ConfigError(f"{path} is neither a folder of classes nor one of {kinds}")
        return Samples(inputs, _places(path, found, classes, numbered=suffix in TENSORS))
    except DataError as error:
        raise ConfigError(error) from None


def _must_exist(path: Path) -> None:
    if not os.path.exists(path):  # unlike Path's, False also for what cannot be asked
        raise ConfigError(f"there is no file or folder {path}")


def _in_order(path: Path, columns: Sequence[str], values: Tensor, features: Sequence[str]) -> Tensor:
    """Return the columns (n, columns) of a table in the order of the features that the network was trained on."""
    if not features:
        return values
    missing = [name for name in features if name not in columns]
    if missing:
        raise ConfigError(
            f"{path} has no column {missing[0]!r}{nearest(missing[0], columns)}; the network was trained on "
            f"{', '.join(features)[:200]}"
        )
    return values[:, [columns.index(name) for name in features]].contiguous()


def _places(path: Path, labels: LabelArray, classes: tuple[str, ...], numbered: bool) -> Tensor:
    """Return labels as places among the classes: names, or, if they may be `numbered`, the places themselves."""
    names = {name: place for place, name in enumerate(classes)}
    if labels.dtype.kind == "U" or not numbered or any(name.isdecimal() for name in classes):
        called = [printable(str(value)) for value in labels.tolist()]
        unknown = sorted(set(called) - names.keys())
        if unknown:
            raise ConfigError(f"{path}: class {unknown[0]!r} is none of the run's: {', '.join(classes)[:200]}")
        return torch.tensor([names[name] for name in called])
    if int(labels.max()) >= len(classes):
        raise ConfigError(f"{path}: label {int(labels.max())} is not one of the run's 0 to {len(classes) - 1}")
    return torch.from_numpy(labels)


def _folder(path: Path, shape: tuple[int, ...], classes: tuple[str, ...]) -> Samples:
    tree = {printable(name): images for name, images in class_tree(path, path, []).items()}
    for name in tree:
        if name not in classes:
            raise ConfigError(f"{path / name}: class {name!r} is none of the run's: {', '.join(classes)[:200]}")
    files = [(file, classes.index(name)) for name, images in tree.items() for file in images]
    inputs = torch.cat([_image(file, shape) for file, _ in files])
    return Samples(inputs, torch.tensor([label for _, label in files]))


def _image(path: Path, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ConfigError(f"{path} is an image; this network takes samples of shape {shape}: give a file with x")
    channels, height, width = shape
    pixels = read_image(path, "L" if channels == 1 else "RGB", (width, height))
    return torch.from_numpy(pixels.copy()).view(1, height, width, channels).movedim(-1, 1)


def _fitting(path: Path, inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(inputs.shape[1:]) != shape:
        raise ConfigError(f"{path} holds samples of shape {tuple(inputs.shape[1:])}; the network takes {shape}")
    return inputs

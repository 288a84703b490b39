"""Image folders `{train,test}/<class>/*.png`, unpacked or inside the archive that fast.ai distributes."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from jgesr_lightning.data.archive import read_tgz
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset

Member = tuple[str, str, str, bytes | memoryview]  # split, class, file name, content


def read_archive(name: str, path: Path) -> RawDataset:
    """Decode an image-folder archive (.tgz), without unpacking it to disk.

    Raises:
        DataError: the archive is damaged, or is not laid out as `.../{train,test}/<class>/*.png`.

    """
    members = [(*place, content) for entry, content in read_tgz(path).items() if (place := _place(entry)) is not None]
    return _decode(name, path, members)


def read_folder(name: str, path: Path) -> RawDataset:
    """Decode an unpacked image folder; the result equals that of its archive.

    Raises:
        DataError: an image is damaged, or the folder is not laid out as `{train,test}/<class>/*.png`.

    """
    files = [file for split in ("train", "test") for file in (path / split).glob("*/*.png")]
    try:
        members = [(*place, file.read_bytes()) for file in files if (place := _place(file.as_posix())) is not None]
    except OSError as error:
        raise DataError(f"{path} is unreadable ({error})") from error
    return _decode(name, path, members)


def _place(entry: str) -> tuple[str, str, str] | None:
    """Return split, class and file name of an entry, or None if it is not an image of the set."""
    parts = PurePosixPath(entry).parts
    if len(parts) < 3 or parts[-3] not in ("train", "test") or parts[-1].startswith(".") or parts[-1][-4:] != ".png":
        return None
    return parts[-3], parts[-2], parts[-1]


def _decode(name: str, path: Path, members: Iterable[Member]) -> RawDataset:
    members = sorted(members, key=lambda member: member[:3])  # one order, whatever the file system's or the archive's
    classes = tuple(sorted({label for _, label, _, _ in members}))
    splits = []
    for split in ("train", "test"):
        own = [member for member in members if member[0] == split]
        if not own:
            raise DataError(f"{path} holds no images at {split}/<class>/*.png; it is incomplete or another archive")
        labels = torch.tensor([classes.index(label) for _, label, _, _ in own])
        splits.append((_decode_all(path, own), labels))
    return make_dataset(name, splits[0], splits[1], classes)


def _decode_all(path: Path, members: list[Member]) -> Tensor:
    images: list[npt.NDArray[np.uint8]] = []
    for *place, content in members:
        entry = "/".join(place)
        try:
            with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
                images.append(np.asarray(picture.convert("RGB")))
        except (OSError, SyntaxError, ValueError, struct.error, zlib.error) as error:  # Pillow's ways to say damaged
            raise DataError(f"{path} is damaged: {entry} is not a PNG image; put a good copy there") from error
        if images[-1].shape != images[0].shape:
            raise DataError(f"{path}: {entry} is {images[-1].shape}, the first image {images[0].shape}")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()

"""Image folders `{train,test}/<class>/*.png`, unpacked or inside the archive that fast.ai distributes."""

from __future__ import annotations

import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset

Member = tuple[str, str, str, bytes]  # split, class, file name, content


def read_archive(name: str, path: Path) -> RawDataset:
    """Decode an image-folder archive (.tgz), without unpacking it to disk.

    Raises:
        DataError: the archive is damaged, or is not laid out as `.../{train,test}/<class>/*.png`.

    """
    members: list[Member] = []
    try:
        with tarfile.open(path, "r:gz") as archive:
            for entry in archive:
                place = _place(entry.name)
                if entry.isfile() and place is not None:
                    content = archive.extractfile(entry)
                    assert content is not None  # it is None only for what is no file
                    members.append((*place, content.read()))
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); remove it or put a good copy there") from error
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


def _decode(name: str, path: Path, members: list[Member]) -> RawDataset:
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
    from torchvision.io import ImageReadMode, decode_png  # slow to import, and not needed once there is a cache

    def decode(member: Member) -> Tensor:
        try:
            return decode_png(torch.frombuffer(bytearray(member[3]), dtype=torch.uint8), ImageReadMode.RGB)
        except (RuntimeError, ValueError) as error:  # ValueError: an empty file
            entry = "/".join(member[:3])
            raise DataError(f"{path} is damaged: {entry} is not a PNG image; put a good copy there") from error

    images = torch.empty((len(members), *decode(members[0]).shape), dtype=torch.uint8)

    def fill(start: int) -> None:
        for i, member in enumerate(members[start : start + 500], start):
            image = decode(member)
            if image.shape != images.shape[1:]:
                raise DataError(
                    f"{path}: {'/'.join(member[:3])} is {tuple(image.shape)}, others {tuple(images.shape[1:])}"
                )
            images[i] = image

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # decoding releases the interpreter lock
        list(pool.map(fill, range(0, len(members), 500)))
    return images

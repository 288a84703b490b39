"""Image folders `{train,test}/<class>/*.png`, unpacked or inside the archive that fast.ai distributes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from jgesr_lightning.data import published
from jgesr_lightning.data.archive import read_file, read_tgz
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset, summary_of

ARCHIVE_LIMIT = 512_000_000  # bytes, decompressed: 60,000 images of 32 x 32 that did not shrink at all have 300 million
ARCHIVE_ENTRIES = 100_000
FILE_LIMIT = 16_384  # bytes of one image, which raw has 3,072
SIZE = (32, 32)
GREY = ("1", "L", "LA")  # modes without colour

Member = tuple[str, str, str, memoryview]  # split, class, file name, content


def read_archive(path: Path, verify: bool = True) -> RawDataset:
    """Decode CIFAR-10 as an image-folder archive (.tgz), without unpacking it to disk.

    Args:
        path: the archive.
        verify: whether its images must be the published ones.

    Raises:
        DataError: the archive is damaged or another one, or is not laid out as `.../{train,test}/<class>/*.png`.

    """
    return _decode(path, read_tgz(path, ARCHIVE_LIMIT, ARCHIVE_ENTRIES).items(), verify)


def read_folder(path: Path, verify: bool = True) -> RawDataset:
    """Decode the unpacked image folder; the result equals that of its archive, and so do arguments and errors."""
    files = (file for split in ("train", "test") for file in (path / split).glob("*/*"))
    return _decode(path, ((file.relative_to(path).as_posix(), file) for file in files), verify)


def _place(entry: str) -> tuple[str, str, str] | None:
    """Return split, class and file name of an entry, or None if it is not an image of the set."""
    parts = PurePosixPath(entry).parts
    if len(parts) < 3 or parts[-3] not in ("train", "test") or parts[-1][-4:].lower() != ".png":
        return None
    return None if parts[-1].startswith(".") or parts[-2].startswith(".") else (parts[-3], parts[-2], parts[-1])


def _decode(path: Path, entries: Iterable[tuple[str, Path | memoryview]], verify: bool) -> RawDataset:
    """Return the data set in entries that are named by their places, each with its file or its content."""
    members: list[Member] = []
    left_out = []
    for entry, content in entries:
        if place := _place(entry):
            members.append((*place, read_file(content, FILE_LIMIT) if isinstance(content, Path) else content))
        else:
            left_out.append(entry)
    members.sort(key=lambda member: member[:3])  # one order, whatever the file system's or the archive's
    classes = tuple(sorted({label for _, label, _, _ in members}))
    splits = {}
    for split in ("train", "test"):
        own = [member for member in members if member[0] == split]
        if not own:
            raise DataError(f"{path} holds no images at {split}/<class>/*.png; it is incomplete or another archive")
        labels = torch.tensor([classes.index(label) for _, label, _, _ in own])
        splits[split] = _decode_all(path, own), labels
    if verify:
        published.check_images(path, splits)
    return make_dataset("cifar10", splits["train"], splits["test"], classes, path, left_out=summary_of(left_out))


def _decode_all(path: Path, members: Sequence[Member]) -> Tensor:
    images = np.empty((len(members), *SIZE, 3), np.uint8)
    for image, (*place, content) in zip(images, members, strict=True):
        image[:] = decode_image(f"{path}: {'/'.join(place)}", content, "RGB", SIZE)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def decode_image(
    where: str,
    content: bytes | memoryview,
    mode: str | None,
    size: tuple[int, int] | None,
    formats: Sequence[str] = ("PNG",),
    why: str = "",
) -> npt.NDArray[np.uint8]:
    """Return an image, (H, W, 3) in colour or (H, W) in grey; nothing is decoded of any other size than `size`.

    Args:
        where: what messages begin with.
        content: the image file.
        mode: "RGB" for colour; None: grey stays grey, all else is colour.
        size: (width, height) that it must have; None: any.
        formats: what formats it may be in.
        why: what messages add to the size that is needed.

    Raises:
        DataError: it is no whole image of these formats, is of another size, or of more than 8 bits a channel.

    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=tuple(formats)) as picture:
                found, kind = picture.size, picture.mode
                deep = kind[0] in "IF" or re.search(";16[BLN]", str(picture.tile))  # colours Pillow would cut to 8 bits
                if size in (None, found) and not deep:
                    return np.asarray(picture.convert(mode or ("L" if kind in GREY else "RGB")))
    except Exception as error:  # Pillow's ways to say damaged are many
        reason = " ".join(str(error).partition(" <_io.")[0].split())[:100]
        kinds = " or ".join(sorted(formats))
        raise DataError(f"{where} is damaged, or no {kinds} image ({reason}); put a good copy there") from error
    if deep:
        raise DataError(f"{where} has more than 8 bits a channel (mode {kind}); give such images as data.name=tensors")
    assert size is not None
    raise DataError(
        f"{where} is an image of {found[0]} x {found[1]} pixels, where {size[0]} x {size[1]} are needed{why}"
    )

"""Image folders of one's own: `<class>/**/*.png`, .jpg and so on, as one tree or as `train/` and `test/` alike."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.data.archive import read_file
from jgesr_lightning.data.dataset import DataError, RawDataset, check_classes, make_dataset, summary_of
from jgesr_lightning.data.images import decode_image
from jgesr_lightning.data.registry import Source, check_place, looking_into

FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".bmp": "BMP",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".pbm": "PPM",
}
FILE_LIMIT = 1 << 28  # bytes of one image file
OTHERS = ("@eaDir", "__MACOSX", "lost+found")  # folders of file servers (thumbnails), of archives, of disks
PARTS = ("train", "training", "test", "testing", "val", "valid", "validation")  # what parts of a set are called

Tree = dict[str, list[Path]]  # a class -> its images


def find_folder(root: Path, given: bool) -> Source:
    """Find images at `<class>/**` below the folder, or below its `train/` and `test/`.

    The test/ tree is not used: clients are tested on what they themselves hold, of train/. It is said so. Grey images
    have one channel; where any image is in colour, all have three.

    Raises:
        DataError: there are no images, one of `train/` and `test/` alone or under other names, or a class for testing
            only.

    """
    check_place("folder", "the folder with one folder of images a class", root, given)
    with looking_into(root):
        train, test, left_out = _list(root)
    files = tuple(path for tree in (train, test) for images in tree.values() for path in images)
    return Source(lambda: _read(root, train, test, left_out), files, left_out, beside=False)


def _list(root: Path) -> tuple[Tree, Tree, str]:
    """Return the images of each class, for training and for testing (empty: one tree for both), and what was left."""
    left_out: list[str] = []
    parts = [name for name in ("train", "test") if os.path.isdir(root / name)]
    if len(parts) == 1 and any(path.is_dir() for path in (root / parts[0]).iterdir()):
        raise DataError(
            f"{root} holds {parts[0]}/ without its counterpart; it must hold train/ and test/, or one folder a class "
            f"(if these are in {parts[0]}/, name that folder in data.root)"
        )
    if len(parts) < 2:
        tree = class_tree(root, root, left_out)
        if len(tree) > 1 and {name.lower() for name in tree} <= set(PARTS):
            raise DataError(
                f"{root} holds {', '.join(tree)}, which look like parts of a set rather than classes; call them train "
                "and test, or name one of them in data.root"
            )
        return tree, {}, summary_of(left_out)
    left_out += beside(root)
    train, test = (class_tree(root / name, root, left_out) for name in ("train", "test"))
    unknown = sorted(test.keys() - train.keys())
    if unknown:
        raise DataError(f"{root}: class {unknown[0]} has images in test/ and none in train/")
    unused = f"the {sum(map(len, test.values()))} images of test/ are not used: clients are tested on part of train/"
    return train, test, "; ".join(filter(None, (summary_of(left_out), unused)))


def _read(root: Path, train: Tree, test: Tree, left_out: str) -> RawDataset:
    classes = tuple(sorted(train))
    check_classes(root, classes)  # before anything is decoded
    images = _decode_all([path for tree in (train, test) for label in classes for path in tree.get(label, [])])
    labels, tested = (
        torch.arange(len(classes)).repeat_interleave(torch.tensor([len(tree.get(label, [])) for label in classes]))
        for tree in (train, test)
    )
    rest = (images[len(labels) :], tested) if test else None
    return make_dataset("folder", (images[: len(labels)], labels), rest, classes, root, left_out=left_out)


def beside(root: Path) -> list[str]:
    """Return what lies in a folder beside its `train/` and `test/`."""
    return sorted(path.name for path in root.iterdir() if path.name not in ("train", "test", ".cache"))


def class_tree(folder: Path, root: Path, left_out: list[str]) -> Tree:
    """Return the images below each folder in `folder`, in the order of their paths; what is none goes to `left_out`.

    Raises:
        DataError: there are none.

    """
    tree: Tree = {}
    for place in sorted(folder.iterdir()):
        if place.name == ".cache":
            continue
        if _hidden(place.name) or not place.is_dir():
            left_out.append(place.relative_to(root).as_posix())
        elif images := _images(place, root, left_out):
            tree[place.name] = images
        else:
            left_out.append(f"{place.relative_to(root).as_posix()}/ (no images)")
    if not tree:
        raise DataError(f"{folder} holds no images at <class>/*{{{','.join(FORMATS)}}}")
    return tree


def _hidden(folder: str) -> bool:
    return folder.startswith(".") or folder in OTHERS


def _images(place: Path, root: Path, left_out: list[str]) -> list[Path]:
    found, seen = [], set()
    for here, folders, files in os.walk(place, onerror=_refuse, followlinks=True):
        identity = os.path.realpath(here)
        if identity in seen:  # a link to a folder above itself
            folders.clear()
            continue
        seen.add(identity)
        hidden = sorted(filter(_hidden, folders))
        folders[:] = sorted(set(folders) - set(hidden))
        for name in sorted(files):
            path = Path(here, name)
            if name.startswith(".") or path.suffix.lower() not in FORMATS or not path.is_file():
                left_out.append(path.relative_to(root).as_posix())
            else:
                found.append(path)
        left_out += [Path(here, name).relative_to(root).as_posix() for name in hidden]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error  # a folder that may not be looked into would be lost in silence


def _decode_all(files: list[Path]) -> Tensor:
    first = read_image(files[0], None, None)
    height, width, *colour = first.shape
    images = _room(files, (height, width, *colour))
    for k, path in enumerate(files):
        image = first if k == 0 else read_image(path, None, (width, height), f", as {files[0]} is")
        if image.ndim == 3 and images.ndim == 3:  # the first one in colour: those before it were grey
            former, images = images, _room(files, (height, width, 3))
            images[:k] = former[:k, :, :, None]
        images[k] = image if image.ndim == images.ndim - 1 else image[:, :, None]
    stacked = torch.from_numpy(images)
    return stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()


def _room(files: list[Path], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    try:
        return np.empty((len(files), *shape), np.uint8)
    except (MemoryError, ValueError):
        raise DataError(f"{files[0]} and {len(files) - 1} images like it ({shape}) do not fit into memory") from None


def read_image(path: Path, mode: str | None, size: tuple[int, int] | None, why: str = "") -> npt.NDArray[np.uint8]:
    """Return the image in a file, by `decode_image`."""
    kinds = tuple({FORMATS[path.suffix.lower()], "PNG", "JPEG"})  # an ending may be mistaken, as torchvision allows
    return decode_image(str(path), read_file(path, FILE_LIMIT), mode, size, kinds, why)

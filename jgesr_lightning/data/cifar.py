"""CIFAR-10 as its authors publish it: six pickles, in a folder or in `cifar-10-python.tar.gz`."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.data.archive import read_tgz
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.unpickle import load_arrays

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.str_]]  # pixels, labels, file names


def read_batches(name: str, path: Path) -> RawDataset:
    """Read the pickles in a folder, or in the archive if `path` is a file.

    Images are sorted by class, then by file name. That is the order of the image-folder archive: the same experiment is
    the same from either source.

    Raises:
        DataError: a file is missing or damaged.

    """
    packed = None if path.is_dir() else read_tgz(path)
    try:
        batches = [
            _read_batch((path / file).read_bytes() if packed is None else packed[f"{FOLDER}/{file}"])
            for file in (*TRAIN_FILES, TEST_FILE)
        ]
    except (OSError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it or put a good copy there") from error
    return make_dataset(name, _join(batches[:-1]), _join(batches[-1:]), CLASSES)


def _read_batch(content: bytes | memoryview) -> Batch:
    batch = load_arrays(io.BytesIO(content))
    data, labels, names = np.asarray(batch["data"]), np.asarray(batch["labels"]), np.asarray(batch["filenames"])
    if data.dtype != np.uint8 or data.shape != (len(labels), 3072) or names.shape != labels.shape:
        raise ValueError(f"data of {data.dtype} {data.shape}, {len(labels)} labels, {len(names)} file names")
    return data, labels, names


def _join(batches: list[Batch]) -> tuple[Tensor, Tensor]:
    data, labels, names = (np.concatenate(column) for column in zip(*batches, strict=True))
    order = np.lexsort((names, labels))
    images = torch.from_numpy(np.ascontiguousarray(data[order])).reshape(-1, 3, 32, 32)
    return images, torch.from_numpy(labels[order].astype(np.int64))

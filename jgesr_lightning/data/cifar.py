"""CIFAR-10 as its authors publish it: six pickles, in a folder or in `cifar-10-python.tar.gz`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.data import published
from jgesr_lightning.data.archive import read_file, read_tgz
from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.unpickle import array_of, load_arrays

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"

BATCH_LIMIT = 64_000_000  # bytes; a published batch has 31 million
ARCHIVE_LIMIT = 256_000_000  # bytes, decompressed; the published archive has 187 million
ARCHIVE_ENTRIES = 100  # of 10
LONGEST_NAME = 255

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.str_]]  # pixels, labels, file names


def read_batches(path: Path, verify: bool = True) -> RawDataset:
    """Read the pickles in a folder, or in the archive if `path` is a file.

    Images are sorted by class, then by file name. That is the order of the image-folder archive: the same experiment is
    the same from either source.

    Args:
        path: folder or archive.
        verify: whether each pickle must have the published checksum; it is compared before anything is unpickled.

    Raises:
        DataError: a file is missing, damaged, or not the published one.

    """
    packed = None if path.is_dir() else read_tgz(path, ARCHIVE_LIMIT, ARCHIVE_ENTRIES)
    batches = []
    for file in (*TRAIN_FILES, TEST_FILE):
        where: Path | str = path / file if packed is None else f"{FOLDER}/{file} in {path}"
        if packed is not None and f"{FOLDER}/{file}" not in packed:
            raise DataError(f"{path} is damaged: it lacks {FOLDER}/{file}; put a good copy there")
        content = read_file(path / file, BATCH_LIMIT) if packed is None else packed[f"{FOLDER}/{file}"]
        if verify:
            published.check_file(where, content, published.CIFAR10_BATCHES[file])
        try:
            batches.append(_read_batch(content))
        except (ValueError, pickle.UnpicklingError) as error:
            raise DataError(f"{where} is damaged ({error}); remove it or put a good copy there") from error
    return make_dataset("cifar10", _join(batches[:-1]), _join(batches[-1:]), CLASSES)


def _read_batch(content: bytes | memoryview) -> Batch:
    """Return what a batch holds; ValueError where that is not one image, label and file name a sample."""
    batch: Any = load_arrays(content)
    if not isinstance(batch, dict) or not {"data", "labels", "filenames"} <= batch.keys():
        raise ValueError("it holds no data, labels and filenames")
    labels, names, data = batch["labels"], batch["filenames"], array_of(batch["data"])
    # before numpy makes arrays of them: lists in lists, or one long name, would take memory without end
    if not isinstance(labels, list) or any(type(label) is not int or not 0 <= label < len(CLASSES) for label in labels):
        raise ValueError(f"its labels are no list of whole numbers from 0 to {len(CLASSES) - 1}")
    if not isinstance(names, list) or any(type(name) is not str or len(name) > LONGEST_NAME for name in names):
        raise ValueError("its file names are no list of short texts")
    if data.dtype != np.uint8 or data.shape != (len(labels), 3072) or len(names) != len(labels) or not labels:
        raise ValueError(f"data of {data.dtype} {data.shape}, {len(labels)} labels, {len(names)} file names")
    return data, np.asarray(labels), np.asarray(names)


def _join(batches: list[Batch]) -> tuple[Tensor, Tensor]:
    data, labels, names = (np.concatenate(column) for column in zip(*batches, strict=True))
    order = np.lexsort((names, labels))
    images = torch.from_numpy(np.ascontiguousarray(data[order])).reshape(-1, 3, 32, 32)
    return images, torch.from_numpy(labels[order].astype(np.int64))

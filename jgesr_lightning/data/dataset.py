"""A data set in memory, as it was published or handed over: no normalisation yet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 4096  # samples that are measured at once
NAMED = 3  # files that a summary of many names

Arrays = tuple[Tensor | npt.NDArray[Any], Tensor | npt.NDArray[Any]]  # inputs, labels


class DataError(ValueError):
    """Data that is missing or damaged; its message is one line that says what to do."""


@dataclass(frozen=True)
class RawDataset:
    """Samples, labels and the statistics that normalise them. Build it with `make_dataset`, which measures.

    It checks itself, whoever builds it: also what comes out of a cache.

    Attributes:
        name: name in the registry.
        train_inputs: images (n, C, H, W), uint8 or float32, or features (n, features), float32.
        train_labels: (n,) int64, 0 to len(classes) - 1.
        test_inputs: (m, ...) like train_inputs; m = 0 where the set has no test part of its own.
        test_labels: (m,) int64.
        classes: name of each class.
        mean: (C,) or (features,) float64, mean of the training values, of bytes divided by 255.
        std: the same shape, their standard deviation (over n, not n - 1).
        train_clients: (n,) int64 place in `clients` of the client that each training sample is of; None: unknown.
        test_clients: (m,) int64, the same of the test samples; None: they are no client's.
        clients: name of each client that the set knows of.
        left_out: what lay among the files and is not part of the set, in words; empty: nothing.
        features: name of each feature, where the data name them; else empty.

    Raises:
        DataError: these do not fit together.

    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    train_clients: Tensor | None = None
    test_clients: Tensor | None = None
    clients: tuple[str, ...] = ()
    left_out: str = ""
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.train_inputs) == 0:
            raise DataError(f"{self.name}: there are no training samples")
        check_classes(self.name, self.classes)
        self._check_split("train", self.train_inputs, self.train_labels, self.train_clients)
        self._check_split("test", self.test_inputs, self.test_labels, self.test_clients)
        train, test = self.train_inputs, self.test_inputs
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(f"{self.name}: training inputs are {described(train)}, test inputs {described(test)}")
        for field in (self.mean, self.std):
            if field.shape != train.shape[1:2] or not bool(torch.isfinite(field).all()):
                raise DataError(f"{self.name}: mean and std are not {train.shape[1]} finite numbers each")
        if self.features and len(self.features) != train.shape[1]:
            raise DataError(f"{self.name}: {len(self.features)} names for {train.shape[1]} features")
        if not bool((self.std > 0).all()):
            raise DataError(f"{self.name}: a standard deviation is not above 0")

    def _check_split(self, split: str, inputs: Tensor, labels: Tensor, clients: Tensor | None) -> None:
        images = inputs.ndim == 4 and inputs.dtype in (torch.uint8, torch.float32)
        fits = images or (inputs.ndim == 2 and inputs.dtype == torch.float32)
        if not fits or 0 in inputs.shape[1:]:
            raise DataError(
                f"{self.name}: {split} inputs are {described(inputs)}; they must be images (n, C, H, W) in uint8 or "
                "float32, or features (n, features) in float32"
            )
        ranges: list[tuple[str, Tensor, int]] = [("labels", labels, len(self.classes))]
        ranges += [] if clients is None else [("clients", clients, len(self.clients))]
        for what, values, number in ranges:
            if values.shape != (len(inputs),) or values.dtype != torch.int64:
                raise DataError(f"{self.name}: {len(inputs)} {split} inputs but {what} of {described(values)}")
            if len(values) and (int(values.min()) < 0 or int(values.max()) >= number):
                raise DataError(
                    f"{self.name}: {split} {what} reach from {int(values.min())} to {int(values.max())}, but there are "
                    f"{number} {'classes' if what == 'labels' else what}, 0 to {number - 1}"
                )

    @property
    def scale(self) -> int:
        """What inputs are divided by before anything else: 255 for bytes, 1 for floats."""
        return 255 if self.train_inputs.dtype == torch.uint8 else 1

    def normalise(self, inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (inputs / scale - mean) / std, each channel or feature its own, on the device where they are."""
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        mean, std = (x.to(inputs.device, dtype).view(shape) for x in (self.scale * self.mean, self.scale * self.std))
        return inputs.to(dtype, copy=True).sub_(mean).div_(std).contiguous()

    def measured_on(self, indices: Tensor) -> RawDataset:
        """Return the same set, normalised by the training samples at `indices` alone."""
        mean, std = statistics(self.train_inputs, indices)
        return dataclasses.replace(self, mean=mean, std=std)


def make_dataset(
    name: str,
    train: Arrays,
    test: Arrays | None,
    classes: Sequence[str],
    source: Path | None = None,
    **optional: Any,
) -> RawDataset:
    """Measure the training inputs and return the data set.

    Args:
        name: name of the data set.
        train: inputs and labels, as RawDataset describes them: tensors, or NumPy arrays.
        test: the same of the test part; None where there is none.
        classes: name of each class.
        source: file or folder that messages name.
        optional: train_clients, test_clients (tensors, or NumPy arrays), clients, left_out, features of RawDataset.
            Names may be those of files: what no text file can hold in one line is written as an escape.

    Raises:
        DataError: inputs, labels and classes do not fit together.

    """
    inputs, labels = map(torch.as_tensor, train)
    test_inputs, test_labels = (inputs[:0], labels[:0]) if test is None else map(torch.as_tensor, test)
    for key in ("train_clients", "test_clients"):
        if optional.get(key) is not None:
            optional[key] = torch.as_tensor(optional[key])
    optional["clients"] = tuple(map(printable, optional.get("clients", ())))
    optional["left_out"] = printable(optional.get("left_out", ""))
    try:
        if test is not None and len(test_inputs) == 0:
            raise DataError(f"{name}: there are no test samples")
        for split in (labels, test_labels):
            if split.is_floating_point() and not bool((split == split.round()).all()):
                raise DataError(f"{name}: labels are numbers with a fraction; they must be whole numbers from 0 on")
        check_finite(f"{name}: the input", inputs)
        check_finite(f"{name}: the test input", test_inputs)
        numbers = statistics(inputs) if inputs.ndim in (2, 4) and len(inputs) else (torch.zeros(0), torch.zeros(0))
        return RawDataset(
            name,
            inputs,
            labels.long(),
            test_inputs,
            test_labels.long(),
            tuple(map(printable, classes)),
            *numbers,
            **optional,
        )
    except DataError as error:
        raise error if source is None else DataError(f"{source}: {error}") from None


def check_classes(where: Path | str, classes: Sequence[str]) -> None:
    """Raise DataError unless there are classes to tell apart, each of a name of its own."""
    if len(classes) < 2:
        raise DataError(f"{where}: all samples are of one class ({', '.join(classes)}); there must be at least two")
    if len(set(classes)) < len(classes):
        raise DataError(f"{where}: classes names one class twice: {', '.join(classes)[:100]}")


def check_finite(what: str, inputs: Tensor) -> None:
    """Raise DataError, with the first such sample, where inputs (n, ...) hold NaN or infinity."""
    for start in range(0, len(inputs) if inputs.is_floating_point() and inputs.ndim > 1 else 0, CHUNK):
        bad = ~torch.isfinite(inputs[start : start + CHUNK].flatten(1)).all(dim=1)
        if bool(bad.any()):
            raise DataError(f"{what} of sample {start + int(bad.nonzero()[0])} holds NaN or infinity")


def statistics(inputs: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of inputs (n, C, ...), one number each a channel or feature, both (C,) float64.

    Bytes are taken on the scale 0 to 1, exactly, from a histogram; floats in two passes. A channel of one single value
    has deviation 1, so that normalising it gives zeros.

    Args:
        inputs: the samples.
        indices: the ones that count; None: all.

    """
    if inputs.dtype == torch.uint8:
        counts = torch.zeros((inputs.shape[1], 256), dtype=torch.int64)
        for chunk in _chunks(inputs, indices):
            counts += torch.stack([torch.bincount(channel, minlength=256) for channel in chunk])
        values = torch.arange(256, dtype=torch.float64) / 255
        share = counts.double() / counts.sum(dim=1, keepdim=True)
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(dim=1)
    else:
        number = (len(inputs) if indices is None else len(indices)) * math.prod(inputs.shape[2:])
        mean = variance = torch.zeros(inputs.shape[1], dtype=torch.float64)
        for chunk in _chunks(inputs, indices):
            mean = mean + chunk.double().sum(dim=1) / number
        for chunk in _chunks(inputs, indices):
            variance = variance + ((chunk - mean[:, None]) ** 2).sum(dim=1) / number
        # one single value leaves what rounding makes of its mean; two floats that differ at all leave more than this
        variance = torch.where(variance > (mean * 2**-25) ** 2 / number, variance, 0)
    return mean, torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt()


def _chunks(inputs: Tensor, indices: Tensor | None) -> Iterator[Tensor]:
    """Yield (C, values) of some samples at a time."""
    where = torch.arange(len(inputs)) if indices is None else indices
    for part in where.split(CHUNK):
        yield inputs.index_select(0, part).transpose(0, 1).flatten(1)


def printable(text: str) -> str:
    r"""Return a text with escapes for line breaks, controls and bytes that are no UTF-8.

    >>> printable("a\nb\udcff"), printable("ünï, x")
    ('a\\nb\\udcff', 'ünï, x')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def summary_of(left_out: Sequence[str]) -> str:
    """Return one line about files that were left out, with the names of the first few; empty if there are none."""
    if not left_out:
        return ""
    names = ", ".join(sorted(left_out)[:NAMED]) + (", ..." if len(left_out) > NAMED else "")
    files = "1 file that is" if len(left_out) == 1 else f"{len(left_out)} files that are"
    return f"left out {files} not part of the set: {names}"


def described(tensor: Tensor) -> str:
    """Return kind and shape of a tensor, in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

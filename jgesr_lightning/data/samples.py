"""Inputs and labels as people bring them, checked and brought into the one form that the clients train on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.data.dataset import DataError, check_finite

Where: TypeAlias = "Path | str"
LabelArray: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.str_]"

WANTED = "images (n, C, H, W) or (n, H, W), or features (n, features)"


def inputs_of(where: Where, value: Any) -> Tensor:
    """Return samples as images (n, C, H, W), uint8 or float32, or as features (n, features), float32.

    Bytes of images stay bytes; all other numbers become float32. Images without channels get one.

    Args:
        where: file that messages name.
        value: tensor or array that was found there as x.

    Raises:
        DataError: it is of another shape, holds no numbers, or numbers that are not finite.

    """
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(_native(value))
    except (TypeError, ValueError):
        raise DataError(f"{where}: x is {_kind(value)}; it must be numbers: {WANTED}") from None
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise DataError(f"{where}: x is {_kind(tensor)}, not plain real numbers")
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.ndim not in (2, 4) or 0 in tensor.shape:
        raise DataError(f"{where}: x has shape {tuple(tensor.shape)}; it must be {WANTED}, none of them empty")
    if tensor.ndim == 4 and tensor.shape[3] in (1, 3, 4) and tensor.shape[1] > 4:
        raise DataError(
            f"{where}: x has shape {tuple(tensor.shape)}, which looks like (n, H, W, C); channels come first here: "
            "(n, C, H, W)"
        )
    if tensor.ndim == 2 or tensor.dtype != torch.uint8:
        tensor = single(where, tensor.detach()) if tensor.ndim == 2 else tensor.detach().float()
        check_finite(f"{where}: x", tensor)
    return tensor.detach().contiguous()


def single(where: Where, features: Tensor, names: Sequence[str] = ()) -> Tensor:
    """Return features (n, features) in float32.

    Raises:
        DataError: one of them differs between samples, but by less than float32 can hold.

    """
    rounded = features.float()
    if rounded.numel() and features.dtype.itemsize > 2 and features is not rounded:  # float32 holds all of the others
        exact = features if features.is_floating_point() else features.long()  # unsigned ones have no least
        lost = (rounded.amin(0) == rounded.amax(0)) & (exact.amin(0) != exact.amax(0))
        if bool(lost.any()):
            k = int(lost.nonzero()[0])
            name = f"column {names[k]!r}" if names else f"feature {k} of x"
            column = features[:, k].tolist()
            low, high = min(column), max(column)
            raise DataError(
                f"{where}: {name} lies between {low!r} and {high!r}, which float32 cannot tell apart; subtract what "
                "all samples share, or scale it"
            )
    return rounded


def labels_of(where: Where, value: Any, number: int, what: str = "y") -> LabelArray:
    """Return labels, or names of clients, as (n,) whole numbers of at least 0 or as (n,) texts.

    Raises:
        DataError: they are something else, or another number than there are samples.

    """
    try:
        numbers = value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        array = np.asarray(numbers.detach() if isinstance(numbers, Tensor) else numbers)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths, sparse and quantised tensors
        raise DataError(f"{where}: {what} is {_kind(value)}; it must be whole numbers from 0 on, or texts") from None
    if array.shape == (number, 1):
        array = array[:, 0]
    if array.shape != (number,):
        raise DataError(f"{where}: {what} has shape {array.shape}; it must be one entry for each of {number} samples")
    if array.dtype.kind == "U":
        if bool((np.char.strip(array) == "").any()):
            raise DataError(f"{where}: {what} of sample {int((np.char.strip(array) == '').argmax())} is empty")
        return array.astype(np.str_)
    if array.dtype.kind == "f" and bool((array == np.rint(array)).all()) and bool((np.abs(array) < 2**53).all()):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise DataError(f"{where}: {what} is {array.dtype}; it must be whole numbers from 0 on, or texts")
    whole = array.astype(np.int64)
    if bool((whole < 0).any()):
        k = int((whole < 0).argmax())
        raise DataError(f"{where}: {what} of sample {k} is {array[k]}; it must be a whole number of at least 0")
    return whole


def encode(
    parts: Sequence[tuple[Where, LabelArray]], names: Sequence[str] | None = None, what: str = "label"
) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return the names that labels stand for, and the labels as places among them, one tensor a part.

    Without `names`, every value that occurs is a name, whole numbers in their order, texts in alphabetical order. Where
    some parts hold texts, the numbers in the others are texts as well.

    Args:
        parts: labels, each with the file that messages name.
        names: what label 0, 1, ... is called; labels must then be whole numbers below their number.
        what: what the values are called in messages.

    Raises:
        DataError: a label has no name.

    """
    if names is not None:
        for where, labels in parts:
            if labels.dtype.kind == "U":
                raise DataError(
                    f"{where}: {what} {str(labels[0])!r} is a text; with the entry `classes` labels are whole numbers, "
                    "places in it (texts name their classes themselves: leave `classes` out)"
                )
            if len(labels) and int(labels.max()) >= len(names):
                raise DataError(
                    f"{where}: {what} {labels.max()} is not one of 0 to {len(names) - 1}, the names in `classes`"
                )
        return tuple(names), [torch.from_numpy(labels) for _, labels in parts]
    texts = any(labels.dtype.kind == "U" for _, labels in parts)
    same = [labels.astype(np.str_) if texts else labels for _, labels in parts]
    known, places = np.unique(np.concatenate(same), return_inverse=True)
    ends = np.cumsum([len(labels) for labels in same])[:-1]
    return tuple(map(str, known.tolist())), [torch.from_numpy(part) for part in np.split(places, ends)]


def _native(value: Any) -> npt.NDArray[Any]:
    """Return an array in this machine's byte order."""
    array = np.ascontiguousarray(value)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")

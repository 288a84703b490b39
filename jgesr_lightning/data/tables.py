"""Tables of numbers as text (.csv), with a line of names and one named column of labels."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.checks import nearest
from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.samples import LabelArray, single

TABLE = ".csv"
"""Ending of a table's file."""

READING = 2
"""Raise it when tables come to be read otherwise: what is cached of them is then remade."""

MISSING = ("", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "?")
"""What programs write where a value is missing."""

_POINT_ZERO = re.compile(r"^([+-]?\d+)\.0*$")  # a whole number that went through a column with gaps


def read_table(
    path: Path, label: str | None, wanted: Sequence[str] = (), option: str = "data.label"
) -> tuple[tuple[str, ...], Tensor, LabelArray]:
    """Return the names of the features, the features (n, features) float32, and the labels of a table, as texts.

    `as_labels` makes numbers of them; it takes all tables that belong together.

    Args:
        path: file of values separated by commas; its first line names the columns.
        label: name of the column of labels; all others are features. None: all are, and labels are zero.
        wanted: the features that are read, whatever else there is; empty: all.
        option: what `label` is given by, for messages.

    Raises:
        DataError: the file cannot be read, lacks that column, or a value is missing or no finite number.

    """
    values, labels = array("d"), []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            _refuse_semicolons(path, file.readline(), label, wanted, option)
            file.seek(0)
            reader = csv.reader(file, strict=True, skipinitialspace=True)
            columns = [name.strip() for name in next(reader, [])]
            place, read = _places(path, columns, label, wanted, option)
            for row in reader:
                if not row:
                    continue
                if len(row) != len(columns):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but there are {len(columns)} columns"
                    )
                values.extend(_number(path, reader.line_num, columns[k], row[k]) for k in read)
                labels.append("0" if place is None else _label(path, reader.line_num, columns[place], row[place]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({' '.join(str(error).split())[:120]})") from error
    if not labels:
        raise DataError(f"{path} holds no samples below its line of names")
    names = tuple(columns[k] for k in read)
    features = torch.from_numpy(np.frombuffer(values, np.float64).copy()).reshape(len(labels), -1)
    return names, single(path, features, names), np.array(labels)


def _refuse_semicolons(path: Path, line: str, label: str | None, wanted: Sequence[str], option: str) -> None:
    """Raise DataError for the first line of a table as spreadsheets write it where the comma is in numbers."""
    header = next(csv.reader([line], skipinitialspace=True), [])
    if len(header) != 1 or ";" not in header[0] or header[0] in (label, *wanted) or header[0].endswith(("\r", "\n")):
        return  # the last: a name in quotes that goes on in the next line
    columns = [name.strip() for name in next(csv.reader([line], delimiter=";", skipinitialspace=True))]
    then = (
        f"; then name the column of labels by {option}, as {label!r} is none" if label not in (None, *columns) else ""
    )
    raise DataError(f"{path}: its columns are separated by semicolons, and must be by commas{then}")


def _places(
    path: Path, columns: list[str], label: str | None, wanted: Sequence[str], option: str
) -> tuple[int | None, list[int]]:
    """Return the place of the labels among the columns, None where there are to be none, and those of the features."""
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise DataError(f"{path} has more than one column {twice[0]!r}")
    if label is not None and label not in columns:
        found = ", ".join(columns)[:100] or "nothing"
        raise DataError(
            f"{path} has no column {label!r}{nearest(label, columns)}; its first line names {found}; name the column "
            f"of labels by {option} (columns are separated by commas)"
        )
    if columns == [label]:
        raise DataError(f"{path} has the column {label!r} alone; it must have features beside it")
    features = [k for k, name in enumerate(columns) if name != label and (not wanted or name in wanted)]
    if not wanted and not all(columns[k] for k in features):  # most often the row's number, and no feature
        raise DataError(f"{path} has a column without a name; name it, or leave it out (pandas: index=False)")
    return None if label is None else columns.index(label), features


def _label(path: Path, line: int, column: str, text: str) -> str:
    found = _POINT_ZERO.sub(r"\1", text.strip())
    if found in MISSING:
        what = repr(found) if found else "empty"
        raise DataError(f"{path}, line {line}: column {column!r} is {what}; each sample needs a label")
    return found


def _pythons(text: str) -> bool:
    """Whether a text, if it is a number, is one of Python's and of nobody else's: 1_000, or full-width digits."""
    return "_" in text or not text.strip().isascii()


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = math.nan if _pythons(text) else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        raise DataError(f"{path}, line {line}: column {column!r} is {text[:40]!r}; it must be a finite number")
    return value


def as_labels(tables: Sequence[tuple[Path, LabelArray]]) -> list[LabelArray]:
    """Return the labels (texts) of tables that belong together: as whole numbers where all of them are, else as texts.

    Where one number is written in two ways, 1 and 01, they are codes, and texts.

    Raises:
        DataError: all labels of a table are numbers, but one is negative or no whole one.

    """
    texts = [labels for _, labels in tables]
    numbers = [_whole(path, labels) for path, labels in tables]
    found = [values for values in numbers if values is not None]
    writings = len(np.unique(np.concatenate(texts))) if texts else 0
    if len(found) < len(texts) or (found and len(np.unique(np.concatenate(found))) < writings):
        return texts
    return found


def _whole(path: Path, labels: LabelArray) -> LabelArray | None:
    """Return the labels of a table as whole numbers; None where one is no number."""
    try:
        numbers = labels.astype(np.float64)
    except ValueError:
        return None
    if any(map(_pythons, labels.tolist())):
        return None
    whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    if not whole.all():
        wrong = str(labels[int(whole.argmin())])
        raise DataError(f"{path}: labels such as {wrong!r} are numbers, but no whole ones")
    if (least := float(numbers.min())) < 0:
        raise DataError(f"{path}: there is a label {least:.0f}; whole numbers must be at least 0")
    return numbers.astype(np.int64)

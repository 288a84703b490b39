"""What a data set and a partition are to the rest: one function each, known by name."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgesr_lightning import names
from jgesr_lightning.data.dataset import DataError, RawDataset


@dataclass(frozen=True)
class Source:
    """Data that was found.

    Attributes:
        decode: returns the decoded data set.
        files: what it is decoded from; the cache is remade when one of them changes, or the file of the function that
            found them. None: there is nothing to cache.
        settings: what else the result depends on, in words.
        beside: whether the cache may lie beside the data; else it lies in the user's cache folder alone.

    """

    decode: Callable[[], RawDataset]
    files: tuple[Path, ...] = ()
    settings: str = ""
    beside: bool = True


Finder = Callable[..., "Source | RawDataset"]
"""A data set: ``(root, ...) -> Source`` or ``(root, ...) -> RawDataset``.

It looks for the data under `root` and raises DataError if there are none. Of the following options it is given those
that it names as parameters: `download` (whether to fetch what is not there; without it nothing is ever fetched),
`verify` (whether what was published with a checksum must have it), `label` (name of the column of labels), `given`
(whether `root` was given, rather than a default). A Source is decoded once and kept in a cache; a RawDataset is made at
every start.
"""

Partition = Callable[..., Sequence[Any]]
"""A partition: ``(labels, num_clients, ...) -> list of index arrays``.

Of the options `seed`, `kappa`, `min_samples`, `classes_per_client`, `clients` (the client number of each sample, or
None) and `client_names` it is given those that it names as parameters.
"""


def call(key: str, function: Callable[..., Any], *arguments: Any, **offered: Any) -> Any:
    """Return ``function(*arguments, **options)`` with the offered options that its signature has a place for.

    A function of somebody else's need not list what it does not use.

    Args:
        key: the setting that names the function, and its value, for messages: ``data.name=blobs``.
        function: what is called.
        arguments: by position, always given.
        offered: by name, given if they are wanted.

    Raises:
        ValueError: it needs something else.
        DataError: it is none of this package's, and fails; the message says where.

    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
        offered = {name: value for name, value in offered.items() if name in named}
    try:
        signature.bind(*arguments, **offered)
    except TypeError as error:
        name = getattr(function, "__name__", function)
        raise ValueError(f"{key}; {name}{signature} cannot be called for this: {error}") from None
    if getattr(function, "__module__", "").startswith("jgesr_lightning."):
        return function(*arguments, **offered)
    try:
        return function(*arguments, **offered)
    except DataError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise DataError(f"{getattr(function, '__name__', function)} failed: {names.cause(error)}") from error


def check_place(name: str, what: str, root: Path, given: bool, file: bool = False) -> None:
    """Raise DataError unless `root` was given as the place of data of one's own, and is there."""
    if not given:
        raise DataError(f"data.name={name} needs data.root: {what}")
    if not (os.path.exists(root) if file else os.path.isdir(root)):
        state = "is no folder" if os.path.lexists(root) else "does not exist"
        raise DataError(f"data.root is '{root}', which {state}; data.name={name} needs {what}")


@contextlib.contextmanager
def looking_into(root: Path) -> Iterator[None]:
    """Context in which a folder that may not be looked into is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be looked into ({error.strerror})") from error

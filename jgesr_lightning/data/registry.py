"""What a data set and a partition are to the rest: one function each, known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jgesr_lightning import names
from jgesr_lightning.data.dataset import RawDataset


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
    files: tuple[Path, ...] = field(default=())
    settings: str = ""
    beside: bool = True


Finder = Callable[..., "Source | RawDataset"]
Partition = Callable[..., Sequence[Any]]


def register_dataset(name: str) -> Callable[[Finder], Finder]:
    """Make a function ``(root, ...) -> Source`` or ``(root, ...) -> RawDataset`` known as data set `name`.

    It looks for the data under `root` and raises DataError if there are none. Of the following options it is given
    those that it names as parameters: `download` (whether to fetch what is not there; without it nothing is ever
    fetched), `verify` (whether what was published with a checksum must have it), `label` (name of the column of
    labels), `given` (whether `root` was given, rather than a default). A Source is decoded once and kept in a cache; a
    RawDataset is made at every start.
    """

    def register(find: Finder) -> Finder:
        names.register("data", name, find)
        return find

    return register


def register_partition(name: str) -> Callable[[Partition], Partition]:
    """Make a function ``(labels, num_clients, ...) -> list of index arrays`` known as partition `name`.

    Of the options `seed`, `kappa`, `min_samples`, `classes_per_client`, `clients` (the client number of each sample, or
    None) and `client_names` it is given those that it names as parameters.
    """

    def register(function: Partition) -> Partition:
        names.register("partitions", name, function)
        return function

    return register

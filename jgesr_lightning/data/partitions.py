"""The ways to share a training set out over clients: one function each, checked alike, whoever wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jgesr_lightning import checks, names, seeding
from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.partition import Indices, Labels, dirichlet_partition, label_array
from jgesr_lightning.data.registry import Partition, call
from jgesr_lightning.data.tensors import read_npz
from jgesr_lightning.paths import user_path


def iid_partition(labels: Labels, num_clients: int, seed: int = 0) -> list[Indices]:
    """Shuffle the set and cut it into shares of equal size (McMahan et al., AISTATS 2017, "IID").

    Sizes differ by one sample at most.
    """
    order = _rng(seed).permutation(len(label_array(labels)))
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def shards_partition(labels: Labels, num_clients: int, seed: int = 0, classes_per_client: int = 2) -> list[Indices]:
    """Sort the set by class, cut it into shards and deal each client the same number of them at random.

    That is the "pathological non-IID" partition of McMahan et al. (AISTATS 2017), with two shards a client. A shard
    holds one class, or more where it lies across the end of one; shards differ in size by one sample at most.

    Args:
        labels: (n,) integer class labels.
        num_clients: number of clients K.
        seed: the partition depends on it and on the other arguments.
        classes_per_client: shards that a client is dealt.

    Raises:
        ValueError: there are fewer samples than shards.

    """
    y = label_array(labels)
    checks.whole("data.classes_per_client", classes_per_client, at_least=1)
    number = num_clients * classes_per_client
    if len(y) < number:
        raise ValueError(
            f"{len(y)} samples cannot be cut into {number} shards, data.classes_per_client={classes_per_client} for "
            f"each of {num_clients} clients"
        )
    rng = _rng(seed)
    mixed = rng.permutation(len(y))
    shards = np.array_split(mixed[np.argsort(y[mixed], kind="stable")], number)
    dealt = rng.permutation(number).reshape(num_clients, classes_per_client)
    return [np.sort(np.concatenate([shards[i] for i in own])) for own in dealt]


def quantity_partition(
    labels: Labels, num_clients: int, kappa: float, seed: int = 0, min_samples: int = 10
) -> list[Indices]:
    """Draw the sizes of the shares from a symmetric Dirichlet distribution, their samples without regard to class.

    "Quantity skew" of Li et al. (ICDE 2022): q ~ Dir_K(kappa), and client k holds a share q_k of the set. As with
    `dirichlet_partition`, whose arguments and errors these are, a draw that leaves a client too few is drawn again.
    """
    return dirichlet_partition(np.zeros(len(label_array(labels)), np.int64), num_clients, kappa, seed, min_samples)


def natural_partition(
    labels: Labels, num_clients: int, clients: Indices | None, client_names: Sequence[str] = ()
) -> list[Indices]:
    """Give each sample to the client that the data say it is of.

    Args:
        labels: (n,) labels, one a sample.
        num_clients: number of clients; it must be that of the data.
        clients: (n,) client number of each sample, 0 to K - 1; None: the data do not say.
        client_names: name of each client.

    Raises:
        ValueError: the data do not say, or know of another number of clients.

    """
    if clients is None:
        raise ValueError(
            "data.partition is 'natural', but the data do not say which client a sample is of; data.name=clients does, "
            "or data.name=tensors with an entry `clients`"
        )
    if len(client_names) != num_clients:
        raise ValueError(
            f"clients is {num_clients}, but the data are those of {len(client_names)} clients; set "
            f"clients={len(client_names)}, or another data.partition"
        )
    return [np.flatnonzero(clients == k) for k in range(num_clients)]


def read_index_lists(name: str) -> list[Any]:
    """Return the lists in a file: JSON, a list of lists, or .npz, one array a client in the order of the file.

    Raises:
        DataError: there is no such file, or it holds something else.

    """
    path = user_path(name)
    if not os.path.isfile(path):
        raise DataError(f"data.partition: there is no file {path}")
    if path.suffix.lower() == ".npz":
        return list(read_npz(path).values())
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data.partition: {path} cannot be read as JSON ({' '.join(str(error).split())})") from error
    if not isinstance(lists, list) or not all(isinstance(one, list) for one in lists):
        raise DataError(f"data.partition: {path} must hold a list of lists of whole numbers, one list a client")
    return lists


def make_partition(
    partition: str | Partition,
    labels: Indices,
    num_clients: int,
    subset: Indices | None = None,
    clients: Indices | None = None,
    client_names: Sequence[str] = (),
    **options: Any,
) -> list[Indices]:
    """Return K disjoint, sorted index arrays into `labels`, by a named partition, a function or a file of lists.

    Args:
        partition: a partition's name, the path of a file of index lists, or a function; see `Partition`.
        labels: (n,) labels of the whole training set.
        num_clients: number of clients K.
        subset: sorted indices of the samples that are used at all; None: all. A function sees these alone, a file's
            lists, which are of the whole set, lose what is not among them.
        clients: (n,) client number of each sample, or None.
        client_names: name of each client.
        options: seed, kappa, min_samples, classes_per_client.

    Raises:
        ValueError: unknown name, or a partition that cannot be had or does not fit; DataError where a file is to blame.

    """
    checks.whole("num_clients", num_clients, at_least=1)
    used = np.arange(len(labels)) if subset is None else subset
    if isinstance(partition, str) and partition.endswith(names.ENDINGS["partitions"]):
        where = f"data.partition: {partition}"
        parts = _checked(where, read_index_lists(partition), len(labels), num_clients)
        parts = [part[np.isin(part, used)] for part in parts]
    else:
        if isinstance(partition, str):
            function, where = names.find("partitions", partition), f"data.partition={names.label(partition)}"
        else:
            function, where = partition, f"data.partition={getattr(partition, '__name__', partition)}"
        ids = None if clients is None else clients[used]
        found = call(
            where,
            function,
            labels[used],
            num_clients=num_clients,
            clients=ids,
            client_names=tuple(client_names),
            **options,
        )
        parts = [used[part] for part in _checked(where, found, len(used), num_clients)]
    least = options.get("min_samples", 1)
    for k, part in enumerate(parts):
        if len(part) < least:
            name = f" ({client_names[k]})" if partition == "natural" else ""
            lower = "lower it, or " if least > 2 else ""  # one to train on and one to test is the least
            raise ValueError(
                f"{where}: client {k}{name} has {len(part)} samples and data.min_samples is {least}; {lower}use "
                "more data or fewer clients"
            )
    return parts


def _checked(where: str, parts: Any, number: int, num_clients: int) -> list[Indices]:
    """Return index lists as sorted int64 arrays; DataError where they are no disjoint lists, one a client."""
    listed = isinstance(parts, (list, tuple)) or (isinstance(parts, np.ndarray) and parts.ndim > 0)
    if not listed or len(parts) != num_clients:
        found = f"{len(parts)} lists" if listed else f"a {type(parts).__name__}"
        raise DataError(
            f"{where} gave {found}; it must give one list of sample numbers for each of clients={num_clients}"
        )
    arrays, owner = [], np.full(number, -1)
    for k, part in enumerate(parts):
        try:
            array = np.asarray(part)
        except ValueError:  # lists of several lengths
            array = np.empty((0, 0))
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise DataError(f"{where}: what it gives client {k} is no list of whole numbers")
        array = np.sort(array.astype(np.int64))
        if len(array) and (array[0] < 0 or array[-1] >= number):
            wrong = int(array[0] if array[0] < 0 else array[-1])
            raise DataError(
                f"{where}: client {k} is given sample {wrong}; there are {number} samples, 0 to {number - 1}"
            )
        twice = array[:-1][array[1:] == array[:-1]]
        taken = array[owner[array] >= 0]
        if len(twice) or len(taken):
            sample = int(twice[0] if len(twice) else taken[0])
            other = k if len(twice) else int(owner[sample])
            raise DataError(
                f"{where}: sample {sample} is given to client {other} and to client {k}; shares must be disjoint"
            )
        owner[array] = k
        arrays.append(array)
    return arrays


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seeding.derive(seed, seeding.PARTITION))

"""The data of a federated experiment: which client holds which samples, and their tensors."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from jgesr_lightning import checks, seeding
from jgesr_lightning.data.dataset import CHUNK, DataError, RawDataset
from jgesr_lightning.data.partition import Indices, class_table, split_train_test, stratified_subset
from jgesr_lightning.data.partitions import make_partition
from jgesr_lightning.data.planted import Transform, transforms
from jgesr_lightning.data.registry import Partition
from jgesr_lightning.data.sources import load_dataset
from jgesr_lightning.names import FIXED_DATA
from jgesr_lightning.summary import DIGITS


class FederatedDataModule(LightningDataModule):
    """Share the training data of a set out over K clients, and split each share into local train and local test.

    A client is tested on data like those it trains on: the test part of a published set is not used. Where clients
    brought their own files, train and test apart, and keep them (partition "natural"), nothing is split. Samples are
    read when they are asked for, out of the memory-mapped cache, so that a process loads those of its own clients
    alone.

    Args:
        name: data set; see `names.BUILTIN`.
        root: data folder or file; None means environment variable JGESR_DATA, else `data`.
        num_clients: number of clients K.
        kappa: concentration of the Dirichlet partitions; the smaller, the more the clients differ.
        fraction: share of the training data that is used at all, in (0, 1], the same for every class.
        min_samples: fewest training samples of a client, with those that become its test share, at least 2.
        test_share: share of a client's samples that it is tested on, where its tests are not given.
        seed: seed of subset, partition and splits.
        verify: whether files of a published set must have the published checksums.
        partition: how the samples are shared out: a name, a file of index lists, or a function; None:
            "natural" where the data are clients' own files, else "dirichlet".
        classes_per_client: shards that a client is dealt by the partition "shards".
        label: name of the column of labels in tables.
        planted: "labels" or "rotations": clients are in groups whose data differ by this; see `planted.transforms`.
        groups: number of these groups.

    Attributes:
        classes: name of each class.
        num_classes: number of classes.
        input_shape: shape of one sample: (channels, height, width), or (features,).
        sizes: (K,) int64 number of training samples of each client.
        test_sizes: (K,) int64 number of test samples of each client.
        class_counts: (K, num_classes) int64 samples of each client by class, train and test together.
        client_names: name of each client where the partition is the data's own, else empty.
        partition_name: the partition that was used, in a word.
        normalisation: how inputs are normalised, as plain numbers: (x / scale - mean) / std, each channel or feature
            its own.
        client_groups: group of each client where groups are planted, else empty.
        features: name of each feature where the data name them, else empty.
        left_out: what is not part of the experiment, in words; empty: nothing.

    All attributes exist after `setup`.

    """

    classes: tuple[str, ...]
    num_classes: int
    input_shape: tuple[int, ...]
    sizes: Tensor
    test_sizes: Tensor
    class_counts: Tensor
    client_names: tuple[str, ...]
    partition_name: str
    normalisation: dict[str, Any]
    client_groups: tuple[int, ...]
    features: tuple[str, ...]
    left_out: str

    def __init__(
        self,
        name: str = "mnist",
        root: str | os.PathLike[str] | None = None,
        num_clients: int = 20,
        kappa: float = 0.05,
        fraction: float = 1.0,
        min_samples: int = 10,
        test_share: float = 0.25,
        seed: int = 0,
        verify: bool = True,
        partition: str | Partition | None = None,
        classes_per_client: int = 2,
        label: str = "label",
        planted: str | None = None,
        groups: int = 4,
    ) -> None:
        super().__init__()
        checks.whole("data.min_samples", min_samples, at_least=2)
        self.dataset_name = name
        self.root = root
        self.num_clients = num_clients
        self.kappa = kappa
        self.fraction = fraction
        self.min_samples = min_samples
        self.test_share = test_share
        self.seed = seed
        self.verify = verify
        self.partition = partition
        self.classes_per_client = classes_per_client
        self.label = label
        self.planted = planted
        self.groups = groups
        self._transforms: list[Transform] = []
        self._raw: RawDataset | None = None
        self._train: list[Indices] = []
        self._test: list[Indices] = []
        self._tests_given = False
        self._digest = ""

    def setup(self, stage: str | None = None) -> None:
        """Load and partition; the same in every process. The first one downloads and decodes, if need be.

        Raises:
            DataError: no data, or damaged data.
            ValueError: a setting is out of range, or there are too few samples for the clients.

        """
        if self._raw is not None:
            return
        raw = load_dataset(self.dataset_name, self.root, verify=self.verify, label=self.label)
        labels = raw.train_labels.numpy()
        parts = self._share_out(raw, labels)
        if self._tests_given:
            assert raw.test_clients is not None
            given = raw.test_clients.numpy()
            self._train, self._test = parts, [np.flatnonzero(given == k) for k in range(len(parts))]
            if without := [k for k, part in enumerate(self._test) if len(part) == 0]:
                who = f" ({self.client_names[without[0]]})" if self.client_names else ""
                raise DataError(f"client {without[0]}{who} has no test samples; give it some, or leave the client out")
        else:
            splits = [split_train_test(part, labels, self.test_share, self.seed, k) for k, part in enumerate(parts)]
            self._train, self._test = [train for train, _ in splits], [test for _, test in splits]
        whole = self._tests_given or self.dataset_name in FIXED_DATA
        if not whole:  # in data of one's own, what clients are tested on must not take part in the statistics
            raw = raw.measured_on(torch.from_numpy(np.sort(np.concatenate(self._train))))
        self.classes, self.num_classes = raw.classes, len(raw.classes)
        self.input_shape, self.features = tuple(raw.train_inputs.shape[1:]), raw.features
        measured = "the training part of the set" if whole else "the clients' training samples"
        numbers = {"mean": raw.mean.tolist(), "std": raw.std.tolist()}
        self.normalisation = {"scale": raw.scale, **numbers, "measured_on": measured}
        self.sizes = torch.tensor([len(part) for part in self._train])
        self.test_sizes = torch.tensor([len(part) for part in self._test])
        table = class_table(labels, self._train, self.num_classes)
        tested = raw.test_labels.numpy() if self._tests_given else labels
        self.class_counts = torch.from_numpy(table + class_table(tested, self._test, self.num_classes))
        self._plant(len(parts))
        self._raw = raw

    def _share_out(self, raw: RawDataset, labels: Indices) -> list[Indices]:
        """Return each client's samples among the training data."""
        own = raw.train_clients is not None and raw.test_clients is not None
        chosen = self.partition or ("natural" if own or self.dataset_name == "clients" else "dirichlet")
        natural = chosen == "natural"
        self._tests_given = natural and raw.test_clients is not None
        subset = stratified_subset(labels, self.fraction, self.seed)
        parts = make_partition(
            chosen,
            labels,
            self.num_clients,
            subset=subset,
            clients=None if raw.train_clients is None else raw.train_clients.numpy(),
            client_names=raw.clients,
            seed=self.seed,
            kappa=self.kappa,
            min_samples=self.min_samples,
            classes_per_client=self.classes_per_client,
        )
        self.partition_name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", str(chosen))
        self.client_names = raw.clients if natural else ()
        nobodys = len(subset) - sum(map(len, parts))
        words = f"data.partition leaves out {nobodys} of {len(subset)} samples" if nobodys else ""
        anew = raw.train_clients is not None and self.partition is None and not natural
        whose = "the data name their clients; data.partition=natural would keep to them" if anew else ""
        own_tests = raw.test_clients is not None and not self._tests_given
        unused = f"the {len(raw.test_labels)} test samples of the clients' own are not used" if own_tests else ""
        self.left_out = "; ".join(text for text in (raw.left_out, whose, words, unused) if text)
        return parts

    def _plant(self, clients: int) -> None:
        """Put the clients into groups, if there are to be any, and count their classes as they then are."""
        self.client_groups = ()
        if self.planted is None:
            return
        self._transforms = transforms(self.planted, self.groups, self.num_classes, self.input_shape, self.seed)
        self.client_groups = tuple(k % self.groups for k in range(clients))  # of one size, or nearly
        every = torch.arange(self.num_classes)
        for k, group in enumerate(self.client_groups):
            _, renamed = self._transforms[group](torch.zeros(self.num_classes, *self.input_shape), every)
            self.class_counts[k] = torch.zeros_like(self.class_counts[k]).scatter(0, renamed, self.class_counts[k])

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows of the table of clients and their samples: training, test, and all of each class."""
        counts = zip(self.sizes.tolist(), self.test_sizes.tolist(), self.class_counts.tolist(), strict=True)
        rows = [[k, train, test, *classes] for k, (train, test, classes) in enumerate(counts)]
        return ["client", "train", "test", *self.classes], rows

    def facts(self) -> dict[str, Any]:
        """Return what a summary says of the data, as plain values."""
        return {
            "input_shape": list(self.input_shape),
            "classes": list(self.classes),
            "features": list(self.features),
            "normalisation": self.normalisation,
            "partition": self.partition_name,
            "clients": list(self.client_names),
            "sizes": self.sizes.tolist(),
            "test_sizes": self.test_sizes.tolist(),
            "groups": list(self.client_groups),
            "left_out": self.left_out,
            "digest": self.digest(),
        }

    def digest(self) -> str:
        """Return a hash of who holds what: equal for equal data, shared out equally."""
        assert self._raw is not None, "call setup() first"
        if self._digest:
            return self._digest
        hashed = hashlib.sha256(json.dumps([self.input_shape, self.classes, self.client_groups]).encode())
        for indices in (*self._train, *self._test):
            hashed.update(len(indices).to_bytes(8, "little") + np.ascontiguousarray(indices, "<i8").tobytes())
        for inputs, labels in (
            (self._raw.train_inputs, self._raw.train_labels),
            (self._raw.test_inputs, self._raw.test_labels),
        ):
            hashed.update(labels.numpy().astype("<i8").tobytes())
            for part in inputs.split(CHUNK):  # of a file that may not fit the memory
                hashed.update(part.contiguous().numpy().data)
        self._digest = hashed.hexdigest()[:DIGITS]
        return self._digest

    def train_tensors(
        self, client: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return one client's training samples: normalised inputs (n, *input_shape), labels (n,) int64, contiguous."""
        return self._tensors(self._train, client, device, dtype)

    def test_tensors(
        self, client: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return one client's test samples, as `train_tensors` does its training samples."""
        return self._tensors(self._test, client, device, dtype)

    def client_loader(self, client: int, batch_size: int) -> DataLoader[Any]:
        """Return a DataLoader that shuffles one client's training samples, as a plain Lightning script would use it."""
        order = seeding.generator(self.seed, seeding.BATCHES, client=client)
        return DataLoader(TensorDataset(*self.train_tensors(client)), batch_size, shuffle=True, generator=order)

    def train_indices(self, client: int) -> Indices:
        """Return where one client's training samples lie in the set's training data, sorted."""
        return self._of(self._train, client).copy()

    def test_indices(self, client: int) -> Indices:
        """Return where one client's test samples lie in the set's training data (or in its own test data), sorted."""
        return self._of(self._test, client).copy()

    def _of(self, parts: list[Indices], client: int) -> Indices:
        if self._raw is None:
            raise RuntimeError("call setup() before asking for a client's data")
        if not 0 <= client < len(parts):
            raise IndexError(f"client {client} is not one of 0 to {len(parts) - 1}")
        return parts[client]

    def _tensors(
        self, parts: list[Indices], client: int, device: torch.device | str | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(np.ascontiguousarray(self._of(parts, client)))
        assert self._raw is not None  # _of has checked it
        given = self._tests_given and parts is self._test
        inputs, labels = (
            (self._raw.test_inputs, self._raw.test_labels)
            if given
            else (self._raw.train_inputs, self._raw.train_labels)
        )
        samples = inputs.index_select(0, index).to(device)  # bytes travel, a quarter of the floats
        ready = self._raw.normalise(samples, dtype), labels.index_select(0, index).to(device)
        return self._transforms[self.client_groups[client]](*ready) if self.client_groups else ready

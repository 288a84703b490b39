"""The data of a federated experiment: which client holds which samples, and their tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from jgesr_lightning import checks, seeding
from jgesr_lightning.data.dataset import RawDataset
from jgesr_lightning.data.partition import (
    Indices,
    class_table,
    dirichlet_partition,
    split_train_test,
    stratified_subset,
)
from jgesr_lightning.data.sources import load_dataset


class FederatedDataModule(LightningDataModule):
    """Share the training data of a set out over K clients, and split each share into local train and local test.

    The data set's own test images are not used: a client is tested on data like those it trains on. Samples are read
    when they are asked for, out of the memory-mapped cache, so that a process loads those of its own clients alone.

    Args:
        name: data set; see `jgesr_lightning.data.sources`.
        root: data folder; None means environment variable JGESR_DATA, else `data`.
        num_clients: number of clients K.
        kappa: concentration of the Dirichlet partition by class; the smaller, the more the clients differ.
        fraction: share of the training data that is used at all, in (0, 1], the same for every class.
        min_samples: fewest samples of a client, train and test together, at least 2.
        test_share: share of a client's samples that it is tested on.
        seed: seed of subset, partition and splits.
        verify: whether files of a published set must have the published checksums.

    Attributes:
        classes: name of each class.
        num_classes: number of classes.
        in_channels: channels of an image.
        image_size: side of an image, in pixels.
        sizes: (K,) int64 number of training samples of each client.
        test_sizes: (K,) int64 number of test samples of each client.
        class_counts: (K, num_classes) int64 samples of each client by class, train and test together.

    All attributes exist after `setup`.

    """

    classes: tuple[str, ...]
    num_classes: int
    in_channels: int
    image_size: int
    sizes: Tensor
    test_sizes: Tensor
    class_counts: Tensor

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
        self._raw: RawDataset | None = None
        self._train: list[Indices] = []
        self._test: list[Indices] = []

    def prepare_data(self) -> None:
        """Make sure that the data are there, decoded and cached (downloads them if need be)."""
        load_dataset(self.dataset_name, self.root, verify=self.verify)

    def setup(self, stage: str | None = None) -> None:
        """Load and partition; the same in every process.

        Raises:
            DataError: no data, or damaged data.
            ValueError: a setting is out of range, or there are too few samples for the clients.

        """
        if self._raw is not None:
            return
        raw = load_dataset(self.dataset_name, self.root, verify=self.verify)
        *_, channels, height, width = raw.train_inputs.shape
        if height != width:
            raise ValueError(f"{self.dataset_name} has images of {height} x {width}; they must be square")
        labels = raw.train_labels.numpy()
        subset = stratified_subset(labels, self.fraction, self.seed)
        parts = [
            subset[part]
            for part in dirichlet_partition(labels[subset], self.num_clients, self.kappa, self.seed, self.min_samples)
        ]
        splits = [split_train_test(part, labels, self.test_share, self.seed, k) for k, part in enumerate(parts)]
        self._train, self._test = [train for train, _ in splits], [test for _, test in splits]
        self.classes, self.num_classes = raw.classes, len(raw.classes)
        self.in_channels, self.image_size = channels, height
        self.sizes = torch.tensor([len(part) for part in self._train])
        self.test_sizes = torch.tensor([len(part) for part in self._test])
        self.class_counts = torch.from_numpy(class_table(labels, parts, len(raw.classes)))
        self._raw = raw

    def train_tensors(
        self, client: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return one client's training samples: normalised images (n, C, H, W) and labels (n,) int64, contiguous."""
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
        """Return where one client's test samples lie in the set's training data, sorted."""
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
        images = self._raw.train_inputs.index_select(0, index).to(device)  # bytes travel, a quarter of the floats
        return self._raw.normalise(images, dtype), self._raw.train_labels.index_select(0, index).to(device)

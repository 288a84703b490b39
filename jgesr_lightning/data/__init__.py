"""Data sets, their partition over clients, and the data module that hands each client its tensors."""

from typing import TYPE_CHECKING, Any

from jgesr_lightning.data.dataset import DataError, RawDataset, make_dataset
from jgesr_lightning.data.partition import class_table, dirichlet_partition, split_train_test, stratified_subset
from jgesr_lightning.data.partitions import make_partition
from jgesr_lightning.data.registry import Source
from jgesr_lightning.data.sources import data_root, load_dataset

if TYPE_CHECKING:
    from jgesr_lightning.data.module import FederatedDataModule

__all__ = [
    "DataError",
    "FederatedDataModule",
    "RawDataset",
    "Source",
    "class_table",
    "data_root",
    "dirichlet_partition",
    "load_dataset",
    "make_dataset",
    "make_partition",
    "split_train_test",
    "stratified_subset",
]


def __getattr__(name: str) -> Any:
    """Import the data module when it is asked for: Lightning takes seconds, and names of data sets need none of it."""
    if name == "FederatedDataModule":
        from jgesr_lightning.data.module import FederatedDataModule

        return FederatedDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

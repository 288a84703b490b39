"""Data sets, their partition over clients, and the data module that hands each client its tensors."""

from jgesr_lightning.data.dataset import DataError, RawDataset
from jgesr_lightning.data.module import FederatedDataModule
from jgesr_lightning.data.partition import class_table, dirichlet_partition, split_train_test, stratified_subset
from jgesr_lightning.data.sources import DATASETS, Source, data_root, load_dataset, register_dataset

__all__ = [
    "DATASETS",
    "DataError",
    "FederatedDataModule",
    "RawDataset",
    "Source",
    "class_table",
    "data_root",
    "dirichlet_partition",
    "load_dataset",
    "register_dataset",
    "split_train_test",
    "stratified_subset",
]

"""Data sets, their partition over clients, and the data module that hands each client its tensors."""

from jgesr_lightning.data.partition import class_table, dirichlet_partition, split_train_test, stratified_subset

__all__ = ["class_table", "dirichlet_partition", "split_train_test", "stratified_subset"]

"""Federated learning over unreliable links, on PyTorch Lightning Fabric."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jgesr_lightning")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

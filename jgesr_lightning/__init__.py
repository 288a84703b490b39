"""Federated learning over unreliable links, on PyTorch Lightning Fabric.

>>> from jgesr_lightning import load_config, run
>>> result = run(load_config("mnist_quick", "rounds=3"))  # doctest: +SKIP
>>> result.metrics, result.graph, result.models.client(0)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from jgesr_lightning.version import __version__

if TYPE_CHECKING:
    from jgesr_lightning.config import load_config
    from jgesr_lightning.experiment import Result, run
    from jgesr_lightning.trained import load_client

__all__ = ["Result", "__version__", "load_client", "load_config", "run"]

_PLACES = {
    "Result": "jgesr_lightning.experiment",
    "load_client": "jgesr_lightning.trained",
    "load_config": "jgesr_lightning.config",
    "run": "jgesr_lightning.experiment",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: PyTorch and Lightning take seconds."""
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

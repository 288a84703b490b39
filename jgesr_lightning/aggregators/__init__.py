"""The aggregation methods, by name. A new method is one file and one line in the registry below."""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import Any

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload
from jgesr_lightning.checks import nearest, one_of

__all__ = [
    "Aggregate",
    "Aggregator",
    "Upload",
    "aggregator_class",
    "aggregator_names",
    "aggregator_settings",
    "build_aggregator",
    "setting_types",
]

_REGISTRY = {  # the name that configurations use: the module and class, imported when asked for
    "local": "local.Local",
    "fedavg": "fedavg.FedAvg",
    "fedprox": "fedavg.FedProx",
    "cfl": "cfl.CFL",
    "fedamp": "fedamp.FedAMP",
    "pfedgraph": "pfedgraph.PFedGraph",
    "two_step": "two_step.TwoStep",
    "jgesr": "jgesr.JGESR",
    "graph_filter": "graph_filter.GraphFilter",
    "median": "median.Median",
}


def aggregator_names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_REGISTRY)


def aggregator_class(name: str) -> type[Aggregator]:
    """Return the class of a method; ValueError that lists the known ones if there is none of that name."""
    one_of("aggregator name", name, _REGISTRY)
    module, _, attribute = _REGISTRY[name].partition(".")
    found: type[Aggregator] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


def aggregator_settings(name: str) -> dict[str, Any]:
    """Return a method's settings with their defaults, in the order of its constructor."""
    parameters = inspect.signature(aggregator_class(name)).parameters
    return {setting: parameter.default for setting, parameter in parameters.items()}


def setting_types(name: str) -> dict[str, Any]:
    """Return the annotated type of each of a method's settings (such as ``float``, ``bool`` or ``float | None``)."""
    hints = typing.get_type_hints(aggregator_class(name).__init__)
    return {setting: hints[setting] for setting in aggregator_settings(name)}


def build_aggregator(name: str, **settings: Any) -> Aggregator:
    """Return a method by name, with its settings; what is not given keeps the method's default.

    Raises:
        ValueError: unknown name or setting (the message lists the known ones), or a value of wrong type or size.

    >>> build_aggregator("fedprox", mu_prox=0.1).client_terms()
    (Proximal(mu=0.1),)
    """
    known = aggregator_settings(name)
    for setting in settings:
        if setting not in known:
            listed = f"known: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name} has no setting {setting!r}{nearest(setting, known)}; {listed}")
    return aggregator_class(name)(**settings)

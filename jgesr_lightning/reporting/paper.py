"""The numbers printed in the paper (MLSP 2025, arXiv 2505.11648), Table 1: local test accuracy in percent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgesr_lightning.reporting.runs import Column
from jgesr_lightning.reporting.text import part

_COLUMNS: tuple[Column, ...] = (
    Column("mnist", 0.1, 0.0),
    Column("mnist", 0.2, 0.0),
    Column("cifar10", 0.1, 0.0),
    Column("cifar10", 0.2, 0.0),
)
_TABLE = {
    "jgesr": (95.17, 92.68, 83.86, 78.04),
    "two_step": (88.99, 83.77, 72.30, 69.90),
    "fedavg": (90.48, 89.96, 77.31, 74.80),
    "fedprox": (90.38, 91.19, 76.69, 74.10),
    "cfl": (92.96, 91.21, 78.35, 75.70),
    "fedamp": (93.12, 92.40, 78.70, 75.12),
    "pfedgraph": (92.76, 92.01, 78.19, 75.24),
}
_SETTINGS = {
    "clients": 20, "rounds": 30, "participation": 1.0, "data.partition": "dirichlet", "data.planted": None,
    "data.kappa": 0.05, "data.fraction": 1.0, "data.test_share": 0.25, "local.epochs": 5, "local.lr": 0.01,
    "local.optimizer": "sgd", "local.momentum": 0.0, "local.weight_decay": 0.0, "local.clip_norm": None,
    "local.schedule": "constant", "local.proximal_mu": None, "channel.name": "gaussian",
    "downlink.noise": 0.0, "downlink.missing_rate": 0.0,
}  # fmt: skip
"""What the paper (section 5) says about all runs. Batch size, widths and the baselines' settings it leaves open."""

_ANY = ("data.fraction",)
"""Settings of those in which a run may differ and still stand beside the paper's numbers: how much data there was."""

_UNSET = {"local.proximal_mu": "each method's own"}
"""What None means of those, where it is not none."""

NUMBERS: Mapping[tuple[str, Column], float] = {
    (method, column): value for method, values in _TABLE.items() for column, value in zip(_COLUMNS, values, strict=True)
}
"""(method, column) -> accuracy in percent; there is none of a method with other settings than its defaults."""


def is_papers(settings: Mapping[str, Any]) -> bool:
    """Return whether a table's shared settings are those of the paper's experiment, but for the amount of data."""
    return not different(settings).keys() - set(_ANY)


def departures(settings: Mapping[str, Any]) -> list[str]:
    """Return where a table's shared settings are not the paper's, such as ``data.fraction 0.1 (paper: 1.0)``."""
    return [
        f"{key} {part(settings[key])} (paper: {_UNSET.get(key, 'none') if paper is None else paper})"
        for key, paper in different(settings).items()
    ]


def different(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's value of each setting that has another here."""
    return {key: paper for key, paper in _SETTINGS.items() if key in settings and settings[key] != paper}

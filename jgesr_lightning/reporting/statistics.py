"""Means over seeds, and paired differences with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom
_T = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272,
)  # fmt: skip
_Z = 1.959963984540054


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        mean: over seeds.
        std: sample standard deviation (divisor n - 1), None for a single seed.
        n: number of seeds.
    """

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """Mean difference between two methods over the seeds that both have.

    Attributes:
        mean: of the differences.
        half_width: of the 95 % confidence interval (Student's t), None for a single seed.
        n: number of seeds in common.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of at least one value."""
    return Mean(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def paired(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Difference | None:
    """Return ``first - second`` over the seeds in both mappings; None where they share none."""
    shared = sorted(first.keys() & second.keys(), key=str)
    if not shared:
        return None
    of = mean_of([first[seed] - second[seed] for seed in shared])
    return Difference(of.mean, None if of.std is None else t_quantile(of.n - 1) * of.std / math.sqrt(of.n), of.n)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond 30 degrees of freedom by its expansion about the normal one.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1; got {degrees}")
    if degrees <= len(_T):
        return _T[degrees - 1]
    terms = (
        _Z,
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return math.fsum(term / float(degrees) ** power for power, term in enumerate(terms))

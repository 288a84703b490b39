"""Means over seeds, and paired differences with confidence intervals, each by itself and corrected for their number."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t without the half second that scipy.stats takes to import

LEVEL = 0.05
"""Chance that an interval misses the truth; for corrected ones, that any of a family wrongly leaves out zero."""

Key = TypeVar("Key", bound=Hashable)

_ROUNDING = 1e-12
"""What is smaller, as a share of the values it is the difference of, is rounding."""


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
        error: standard error of the mean, None for a single seed. Of zero it tells nothing of chance, unless the mean
            is zero, too: accuracies are coarse, and two seeds easily differ by the same.
        n: number of seeds in common.
        holm_level: 1 minus the confidence of the interval that is corrected for the number of differences in a table.
    """

    mean: float
    error: float | None
    n: int
    holm_level: float = LEVEL

    @property
    def half_width(self) -> float | None:
        """Half width of the confidence interval (Student's t), None where the error tells nothing."""
        return self._half(LEVEL)

    @property
    def holm_half_width(self) -> float | None:
        """Half width of the corrected interval."""
        return self._half(self.holm_level)

    @property
    def p(self) -> float | None:
        """Two-sided p value of the paired t test, None where the error tells nothing."""
        if self.error is None or self._same:
            return None
        if self.mean == 0:
            return 1.0
        return float(2 * stdtr(self.n - 1, -abs(self.mean) / self.error))

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @property
    def clear_of_all(self) -> bool:
        """Whether the corrected interval leaves zero out."""
        return self.holm_half_width is not None and abs(self.mean) > self.holm_half_width

    @property
    def _same(self) -> bool:
        return self.error == 0 and self.mean != 0

    def _half(self, level: float) -> float | None:
        return None if self.error is None or self._same else t_quantile(self.n - 1, 1 - level / 2) * self.error


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of at least one value."""
    return Mean(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def interval_of(value: Mean) -> float | None:
    """Return the half width of the 95 % confidence interval of a mean (Student's t), None for a single seed."""
    return None if value.std is None else t_quantile(value.n - 1) * value.std / math.sqrt(value.n)


def paired(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Difference | None:
    """Return ``first - second`` over the seeds in both mappings; None where they share none.

    A mean or a deviation that is no more than rounding is zero.
    """
    shared = sorted(first.keys() & second.keys(), key=str)
    if not shared:
        return None
    of = mean_of([first[seed] - second[seed] for seed in shared])
    rounding = _ROUNDING * max(abs(values[seed]) for values in (first, second) for seed in shared)
    mean, std = (0.0 if abs(value) <= rounding else value for value in (of.mean, of.std or 0.0))
    return Difference(mean, None if of.std is None else std / math.sqrt(of.n), of.n)


def corrected(family: Mapping[Key, Difference]) -> dict[Key, Difference]:
    """Return the differences of a family with intervals corrected for their number.

    Holm's procedure tests the i-th smallest of m p values at LEVEL / (m - i + 1) and stops at the first that it cannot
    reject. Each difference's interval is taken at the level of its test, those after the stop at that of the stop: so
    an interval leaves out zero exactly where Holm's procedure rejects. Single seeds have no interval and do not count.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    """
    ranked = sorted(((p, key) for key, one in family.items() if (p := one.p) is not None), key=lambda item: item[0])
    found, stopped = dict(family), False
    level = LEVEL
    for place, (p, key) in enumerate(ranked):
        level = level if stopped else LEVEL / (len(ranked) - place)
        stopped = stopped or p > level
        found[key] = replace(family[key], holm_level=level)
    return found


def t_quantile(degrees: int, probability: float = 1 - LEVEL / 2) -> float:
    """Return a quantile of Student's t.

    >>> round(t_quantile(2), 3)
    4.303
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1; got {degrees}")
    return float(stdtrit(degrees, probability))

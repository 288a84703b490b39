"""Where collaboration pays: which method leads at each setting, and by how much over staying alone and averaging all.

A spot is one pair of values of two settings, such as Dirichlet kappa and noise level; a panel is a sheet of spots whose
other settings are equal. In every spot methods are compared with the better of ``local`` and ``fedavg`` there, on equal
seeds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jgesr_lightning.identity import number_text
from jgesr_lightning.reporting.runs import Run, differing, method_rank
from jgesr_lightning.reporting.statistics import Difference, Mean, corrected, mean_of, paired
from jgesr_lightning.reporting.tables import SETTING_WORDS, in_percent, seed_means
from jgesr_lightning.reporting.text import listed, part, shown
from jgesr_lightning.summary import higher_is_better

ROWS, COLUMNS = "data.kappa", "channel.noise"
BASELINES = ("local", "fedavg")
"""What is possible without a graph: staying alone, and one average for all."""
TOLERANCE, GAIN = 0.5, 2.0
"""Points: a method to rely on is nowhere further below the better baseline, and somewhere further above both."""

_WORDS = {**SETTING_WORDS, "channel.noise": "noise level s", "channel.missing_rate": "missing rate"}

Place = tuple[Any, Any]
"""Values of the two settings: row and column."""
Settings = tuple[tuple[str, Any], ...]
"""The other settings, by which panels differ: sorted pairs of key and value."""


@dataclass(frozen=True)
class Spot:
    """All methods at one pair of values.

    Attributes:
        means: method -> mean over its seeds, in percent.
        base: the better of the baselines by its mean over the seeds that they share; None unless all were run.
        against: method -> that method minus `base` on equal seeds, in points, with the interval by itself and the one
            corrected for the number of methods in the spot (Holm); without `base` and methods that share no seed.
        baselines: the methods that all are compared with.
    """

    means: dict[str, Mean]
    base: str | None
    against: dict[str, Difference]
    baselines: Sequence[str] = BASELINES

    @property
    def best_other(self) -> str | None:
        """The method, no baseline, that is furthest above the better baseline, or least far below it."""
        others = [label for label in self.against if label not in self.baselines]
        return max(others, key=lambda label: self.against[label].mean, default=None)

    @property
    def lead(self) -> Difference | None:
        """`best_other` minus the better baseline: negative where a baseline leads."""
        return None if self.best_other is None else self.against[self.best_other]

    @property
    def leaders(self) -> list[str]:
        """The methods in front to the two decimals shown, best first; baselines before others: they are simpler."""
        points = {label: mean.mean for label, mean in self.means.items()}
        if self.base is not None:
            points = {self.base: 0.0, **{label: one.mean for label, one in self.against.items()}}
        ranked = sorted(points, key=lambda label: points[label], reverse=True)
        level = [label for label in ranked if round(points[label], 2) == round(points[ranked[0]], 2)]
        return [label for label in level if label in self.baselines] or level

    @property
    def leader(self) -> str:
        """The first of them."""
        return self.leaders[0]

    @property
    def seeds(self) -> int:
        """The number of seeds of its methods, the least."""
        return min(mean.n for mean in self.means.values())

    def minus_base(self, label: str) -> Difference | None:
        """Return a method minus the better baseline; for that one itself, nothing."""
        return Difference(0.0, None, self.means[label].n) if label == self.base else self.against.get(label)

    def fewer(self, label: str) -> str:
        """Return in brackets on how many seeds a method is compared, where a baseline has more; else nothing."""
        one = self.minus_base(label)
        return f" ({one.n})" if one is not None and one.n < max(self.means[name].n for name in self.baselines) else ""


@dataclass(frozen=True)
class Panel:
    """A sheet of the map.

    Attributes:
        title: the settings that tell it from other panels.
        spots: (row, column) -> spot; what was not run is absent.
    """

    title: str
    spots: dict[Place, Spot]

    @property
    def rows(self) -> list[Any]:
        """Values of the rows' setting, ascending."""
        return sorted({row for row, _ in self.spots}, key=_rank)

    @property
    def columns(self) -> list[Any]:
        """Values of the columns' setting, ascending."""
        return sorted({column for _, column in self.spots}, key=_rank)


@dataclass(frozen=True)
class Standing:
    """A method over the whole map.

    Attributes:
        label: the method.
        worst: its largest loss against the better of the baselines, and where.
        best: its largest gain over both, and where.
        spots: in how many it can be compared.
        leads: in how many it is in front.
        gains: in how many it is clearly ahead: the corrected interval leaves out zero.
        losses: in how many it is clearly behind.
        everywhere: whether it was run wherever both baselines were, on as many seeds.
    """

    label: str
    worst: tuple[Difference, str]
    best: tuple[Difference, str]
    spots: int
    leads: int
    gains: int
    losses: int
    everywhere: bool = True

    @property
    def reliable(self) -> bool:
        """Whether it was run everywhere, is nowhere 0.5 below the better baseline, and somewhere 2 above both."""
        return self.everywhere and self.worst[0].mean >= -TOLERANCE and self.best[0].mean > GAIN


@dataclass(frozen=True)
class Map:
    """All panels.

    Attributes:
        panels: MNIST first, then by their settings.
        rows: key of the setting that makes the rows.
        columns: key of that which makes the columns.
        metric: what is compared.
        baselines: the methods that all are compared with.
        names: label -> what the study's file calls the method.
    """

    panels: list[Panel]
    rows: str
    columns: str
    metric: str
    baselines: Sequence[str] = BASELINES
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """The methods, in the order of a table's rows."""
        spots = (spot for panel in self.panels for spot in panel.spots.values())
        return sorted({label for spot in spots for label in spot.means}, key=method_rank)

    @property
    def both(self) -> str:
        """The baselines in words."""
        names = [self.name(label) for label in self.baselines]
        return names[0] if len(names) == 1 else f"the {'better' if len(names) == 2 else 'best'} of {listed(names)}"

    def name(self, label: str) -> str:
        """Return what the study's file calls a method, else its label."""
        return shown(self.names.get(label, label), 60)

    @property
    def is_plane(self) -> bool:
        """Whether a panel has two rows and two columns or more, and methods that may lead over the baselines."""
        several = any(len(panel.rows) > 1 and len(panel.columns) > 1 for panel in self.panels)
        leads = in_percent(self.metric) and higher_is_better(self.metric) is True  # of a deviation nobody does
        return several and leads and any(spot.lead for panel in self.panels for spot in panel.spots.values())

    @property
    def count(self) -> int:
        """The number of spots."""
        return sum(len(panel.spots) for panel in self.panels)

    def place(self, panel: Panel, at: Place) -> str:
        """Return a spot's place in words, with its panel where there are several."""
        return self.here(at) if len(self.panels) == 1 else f"{panel.title}, {self.here(at)}"

    def here(self, at: Place) -> str:
        """Return a spot's place in its panel, in words."""
        return f"{_short(self.rows)} {text(at[0])}, {_short(self.columns)} {text(at[1])}"

    def standings(self) -> list[Standing]:
        """Return every method that can be compared somewhere, in the order of a table's rows."""
        spots = [
            (spot, self.place(panel, at))
            for panel in self.panels
            for at, spot in panel.spots.items()
            if spot.base is not None
        ]
        found = []
        for label in self.labels:
            known = [
                (one, where + spot.fewer(label), spot)
                for spot, where in spots
                if (one := spot.minus_base(label)) is not None
            ]
            if known:
                worst, best = (choose(known, key=lambda item: item[0].mean) for choose in (min, max))
                found.append(
                    Standing(
                        label, worst[:2], best[:2], len(known), sum(label in spot.leaders for *_, spot in known),
                        sum(one.clear_of_all and one.mean > 0 for one, *_ in known),
                        sum(one.clear_of_all and one.mean < 0 for one, *_ in known),
                        len(known) == len(spots) and not any(spot.fewer(label) for *_, spot in known),
                    )
                )  # fmt: skip
        return found


def map_of(
    runs: Sequence[Run],
    metric: str,
    rows: str = ROWS,
    columns: str = COLUMNS,
    baselines: Sequence[str] = BASELINES,
    names: Mapping[str, str] | None = None,
) -> Map:
    """Return the map of runs that have an accuracy of that name in their last round.

    Args:
        runs: of any methods, settings and seeds; what is missing leaves gaps.
        metric: name of the accuracy.
        rows: dotted key of the setting that makes the rows.
        columns: of that which makes the columns.
        baselines: labels of the methods that all are compared with.
        names: label -> what the study's file calls a method.
    """
    sheets: dict[Settings, dict[Place, dict[str, list[Run]]]] = {}
    for run in runs:
        settings = dict(run.condition)
        if run.last(metric) is None:
            continue
        at = (settings.pop(rows, None), settings.pop(columns, None))
        rest = tuple(
            sorted((key, _hashable(held)) for key, held in settings.items() if not key.startswith("aggregator."))
        )
        spot = sheets.setdefault(rest, {}).setdefault((_hashable(at[0]), _hashable(at[1])), {})
        spot.setdefault(run.label, []).append(run)
    panels = []
    for rest, title in _titled(sheets):
        places = sorted(sheets[rest], key=lambda at: (_rank(at[0]), _rank(at[1])))
        panels.append(Panel(title, {at: _spot(sheets[rest][at], metric, baselines) for at in places}))
    return Map(panels, rows, columns, metric, tuple(baselines), names or {})


def words(key: str) -> str:
    """Return what a setting is called on an axis.

    >>> words("data.kappa"), words("local.lr"), words("seeds.x")
    ('Dirichlet kappa', 'learning rate', 'seeds.x')
    """
    return _WORDS.get(key, shown(key))


def text(value: Any) -> str:
    """Return a setting's value as it is written on an axis.

    >>> text(0.5), text(None), text("labels")
    ('0.5', 'none', 'labels')
    """
    if value is None:
        return "none"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(float(value)) if number else shown(part(value))


def _spot(runs: Mapping[str, Sequence[Run]], metric: str, baselines: Sequence[str]) -> Spot:
    by_seed = {
        label: {seed: 100 * value for seed, value in seed_means(held, metric).items()} for label, held in runs.items()
    }
    means = {label: mean_of(list(seeds.values())) for label, seeds in by_seed.items()}
    base = _better({label: by_seed.get(label, {}) for label in baselines})
    if base is None:
        return Spot(means, None, {}, baselines)
    differences = {
        label: one
        for label, seeds in by_seed.items()
        if label != base and (one := paired(seeds, by_seed[base])) is not None
    }
    return Spot(means, base, corrected(differences), baselines)


def _better(of_baselines: Mapping[str, Mapping[Hashable, float]]) -> str | None:
    """Return the baseline that is best over the seeds that all of them have."""
    shared = set.intersection(*(set(seeds) for seeds in of_baselines.values()))
    if not shared:
        return None
    return max(of_baselines, key=lambda label: float(np.mean([of_baselines[label][seed] for seed in shared])))


def _titled(sheets: Iterable[Settings]) -> list[tuple[Settings, str]]:
    """Return panels' settings, MNIST first, and what tells each from the others: data set and what not all share."""
    held = {rest: dict(rest) for rest in sheets}
    keys = ["data.name", *(key for key in differing(list(held.values())) if key != "data.name")]
    told = {rest: {key: one[key] for key in keys if key in one} for rest, one in held.items()}

    def rank(rest: Settings) -> tuple[bool, list[tuple[bool, float, str]]]:
        values = [value if isinstance(value, int | float) else text(value) for value in told[rest].values()]
        return not str(told[rest].get("data.name")).startswith("mnist"), [*map(_rank, values)]

    def title(rest: Settings) -> str:
        words = (
            shown(value) if key == "data.name" else f"{_short(key)} {text(value)}" for key, value in told[rest].items()
        )
        return ", ".join(words) or "all runs"

    return [(rest, title(rest)) for rest in sorted(told, key=rank)]


def _short(key: str) -> str:
    if key.startswith("downlink."):  # whose keys are called as the channel's
        return key.replace(".", " ")
    return "s" if key == COLUMNS else key.rpartition(".")[2]


def _hashable(value: Any) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _rank(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)

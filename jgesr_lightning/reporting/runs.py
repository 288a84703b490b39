"""A finished run, and runs that can stand in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jgesr_lightning.config import completed
from jgesr_lightning.identity import (
    CELL,
    condition,
    digest,
    flatten,
    method_label,
    over_link,
    protocol,
    rounded,
    seed_of,
)
from jgesr_lightning.names import is_builtin
from jgesr_lightning.reporting.sources import UNREADABLE, Source, averaged
from jgesr_lightning.reporting.text import part, shown
from jgesr_lightning.summary import DamagedSummaryError, checked

SCHEMA = 1
EVALUATED = "accuracy/received"
"""What every evaluation measures, and what is finite even of models that are not."""

USED_BY = {"data.kappa": ("dirichlet", "quantity"), "data.classes_per_client": ("shards",)}
"""Settings that have a say under some of our partitions alone; one of one's own is given all of them."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        data: the data set, with the link that is none of ours.
        noise: level of the noise.
        missing: rate of the missing entries.
    """

    data: str
    noise: float
    missing: float


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: where its files are.
        summary: the content of ``summary.json``.
        source: its curves, classes and graph.
    """

    folder: Path
    summary: dict[str, Any]
    source: Source

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        config: dict[str, Any] = self.summary["config"]
        return config

    @property
    def name(self) -> str:
        """The name of its folder, in printable characters."""
        return shown(self.folder.name)

    @cached_property
    def label(self) -> str:
        """The method, with what is not its default, in printable characters."""
        return shown(method_label(self.config["aggregator"]))

    @cached_property
    def column(self) -> Column:
        """The column of a table that it belongs to."""
        flat = flatten(self.config)
        data, noise, missing = (flat[key] for key in CELL)
        return Column(shown(over_link(data, flat["channel.name"])), rounded(float(noise)), rounded(float(missing)))

    @cached_property
    def seed(self) -> tuple[Any, ...]:
        """What tells this run from the others of its condition."""
        return seed_of(self.config)

    @property
    def last_round(self) -> int:
        """The number of the round that its summary is of."""
        number: int = self.summary["last"]["round"]
        return number

    @cached_property
    def measured(self) -> dict[str, float | None]:
        """Metric -> its value in the last round, None where it is not finite."""
        return {name: value for name, value in self.summary["last"].items() if name != "round"}

    @cached_property
    def condition(self) -> dict[str, Any]:
        """The settings that decide its outcome, without its seeds: the partition used, and none without a say."""
        settings = condition(self.config)
        told = self.summary.get("data")
        found = told.get("partition") if isinstance(told, Mapping) else None  # older summaries have none
        used = settings.get("data.partition") or (found if isinstance(found, str) else "dirichlet")
        idle = {key for key, uses in USED_BY.items() if is_builtin("partitions", used) and used not in uses}
        return {key: value for key, value in {**settings, "data.partition": used}.items() if key not in idle}

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """The settings that it shares with the other methods of a table."""
        shared = {*protocol(self.config), "data.partition"}
        return {key: value for key, value in self.condition.items() if key in shared}

    @cached_property
    def sharing(self) -> dict[str, Any]:
        """The settings that decide which client holds which samples."""
        chosen = {key: value for key, value in self.condition.items() if key.startswith(("data.", "clients"))}
        own = (self.config.get("seeds") or {}).get("partition")
        return {**chosen, "seed": self.config["seed"] if own is None else own}

    def last(self, metric: str) -> float | None:
        """Return a metric of the last round, or "metric@N": its mean over the last N evaluations.

        None where it was not measured, or not so often, or is not finite.
        """
        name, count = averaged(metric)
        if count > 1:
            values = self._evaluated(name)[-count:]
            return sum(values) / count if len(values) == count and all(map(math.isfinite, values)) else None
        value = self.measured.get(name)
        return None if value is None or not math.isfinite(value) else float(value)

    def _evaluated(self, name: str) -> list[float]:
        """Return a metric's values, finite or not, at the evaluations after a round, which need not be after each."""
        held, evaluated = self.source.history(name), self.source.history(EVALUATED)
        if held is None or evaluated is None:
            return []
        rows = zip(*held, evaluated[1], strict=True)
        return [value for number, value, mark in rows if number > 0 and math.isfinite(mark)]

    def identity(self, exact: bool = False) -> str:
        """Return a text that is the same for runs of equal settings and seed, `exact` or to rounding."""
        settings = self.condition
        if exact:
            flat = flatten(self.config)
            settings = {key: flat[key] if value == rounded(flat.get(key)) else value for key, value in settings.items()}
        return digest({"condition": settings, "seed": self.seed}, 32)


def finished_run(folder: Path, summary: Any, source: Source) -> Run | str:
    """Return the finished run of a summary, or its name and why it cannot be used."""
    try:
        status, schema = checked(summary)["status"], summary.get("schema")
        if schema != SCHEMA:
            return f"{folder.name}: summary.json has format {schema}, this program reads {SCHEMA}"
        if status != "finished":
            reason = f" ({summary['reason']})" if summary.get("reason") else ""
            done = f"after round {summary.get('rounds_done')} of {summary.get('rounds')}"
            return f"{folder.name}: {status}{reason} {done}"
        summary = {**summary, "config": completed(summary["config"])}  # an older run has not all of today's settings
        run = Run(folder, summary, source)
        _ = run.label, run.column, hash(run.seed), run.protocol, run.identity(), run.identity(exact=True)
        _check_numbers(summary)
    except DamagedSummaryError as error:
        return f"{folder.name}: {error}"
    except UNREADABLE as error:
        return f"{folder.name}: summary.json cannot be read ({type(error).__name__}: {error})"
    return run


def _check_numbers(summary: dict[str, Any]) -> None:
    """Raise TypeError or OverflowError where tables and figures would meet something else than a number."""
    values = {f"last.{name}": value for name, value in summary["last"].items()}
    values["seconds.total"] = summary.get("seconds", {}).get("total")
    values |= _numbered("aggregation.objective", summary.get("aggregation", {}).get("objective"))
    for name, held in summary.get("clients", {}).items():
        values |= _numbered(f"clients.{name}", held)
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} is {shown(repr(value), 40)}, not a number")
        float(value or 0)  # an integer may be too large for one
    if not isinstance(summary["last"].get("round"), int):
        raise TypeError(f"last.round is {summary['last'].get('round')!r}, not a whole number")
    if not isinstance(summary["config"]["aggregator"]["name"], str):
        raise TypeError(f"config.aggregator.name is {summary['config']['aggregator']['name']!r}, not a name")
    remarks = summary.get("remarks") or []
    if not isinstance(remarks, list) or not all(isinstance(remark, Mapping) for remark in remarks):
        raise TypeError(f"remarks is {shown(repr(remarks), 40)}, not a list of remarks")


def _numbered(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}[{place}]": value for place, value in enumerate(values)} if isinstance(values, list) else {}


_ORDER = ("local", "fedavg", "fedprox", "cfl", "fedamp", "pfedgraph", "two_step", "jgesr")


def method_rank(label: str) -> tuple[float, str]:
    """Return the sort key that puts methods in the paper's order, each followed by its variants."""
    name = label.partition(" ")[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER) - 2.5, label)


@dataclass(frozen=True)
class Block:
    """Runs that can stand in one table.

    Attributes:
        runs: they differ in method, column and seed only.
        differs: settings in which this block differs from the other ones.
    """

    runs: list[Run]
    differs: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        """The methods, in the order of a table's rows."""
        return sorted({run.label for run in self.runs}, key=method_rank)

    @property
    def columns(self) -> list[Column]:
        """Data sets (MNIST first), noise levels and missing rates."""
        return sorted({run.column for run in self.runs}, key=lambda c: (c.data != "mnist", *c))

    def cell(self, label: str, column: Column) -> list[Run]:
        """Return the runs of one method in one column, by seed."""
        return sorted((r for r in self.runs if r.label == label and r.column == column), key=lambda r: str(r.seed))

    def by_seed(self, label: str, column: Column) -> dict[tuple[Any, ...], list[Run]]:
        """Return the runs of one method in one column, seed by seed: several where settings differ by rounding."""
        seeds: dict[tuple[Any, ...], list[Run]] = {}
        for run in self.cell(label, column):
            seeds.setdefault(run.seed, []).append(run)
        return seeds


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys, sorted, whose values are not the same in all mappings; an absent one is None."""
    keys = sorted(set().union(*settings))
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]


def blocks(runs: Sequence[Run]) -> list[Block]:
    """Split runs into blocks with equal shared settings, the largest first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(digest(run.protocol, 32), []).append(run)
    protocols = [members[0].protocol for members in groups.values()]
    varying = differing(protocols)
    held = {key: {str(values.get(key)) for values in protocols} for key in varying}
    brief = {key for key, texts in held.items() if len(set(map(part, texts))) == len(texts)}  # still tells them apart
    found = [
        Block(members, {key: part(shared[key]) if key in brief else shared[key] for key in varying if key in shared})
        for shared, members in zip(protocols, groups.values(), strict=True)
    ]
    return sorted(found, key=lambda block: -len(block.runs))

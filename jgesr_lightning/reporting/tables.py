"""What a table of finished runs says: means over seeds, the paper's numbers, paired differences, what runs met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.identity import number_text, rounded
from jgesr_lightning.reporting.collection import Collection, collect
from jgesr_lightning.reporting.paper import NUMBERS, departures, different, is_papers
from jgesr_lightning.reporting.runs import USED_BY, Block, Column, Run, blocks, method_rank
from jgesr_lightning.reporting.sources import averaged
from jgesr_lightning.reporting.statistics import Difference, Mean, corrected, mean_of, paired
from jgesr_lightning.reporting.text import part, shown
from jgesr_lightning.summary import higher_is_better

METRIC = "accuracy/received"
PAPERS_METRICS = tuple(f"accuracy/{which}{how}" for which in ("received", "trained") for how in ("", "_weighted"))
"""What the paper's numbers may be: means over clients; it does not say of which models, nor how they are weighed."""
PROPOSED = "jgesr"
SETTING_WORDS = {
    "clients": "clients", "data.partition": "partition", "data.kappa": "Dirichlet kappa",
    "data.classes_per_client": "classes a client", "data.planted": "planted groups by", "data.groups": "groups",
    "data.fraction": "part of the training data", "model.name": "network", "local.epochs": "local epochs",
    "local.batch_size": "batch size", "local.lr": "learning rate", "participation": "participation",
    "local.optimizer": "optimizer", "local.momentum": "momentum", "local.weight_decay": "weight decay",
    "local.clip_norm": "gradients clipped at norm", "local.schedule": "schedule of the learning rate",
    "local.proximal_mu": "weight of the proximal term", "channel.name": "link",
    "downlink.noise": "noise of the downlink", "downlink.missing_rate": "missing rate of the downlink",
}  # fmt: skip
"""The settings that readers ask for first, and what they are called."""
TOLD_WHERE_OTHER = (
    "local.optimizer", "local.momentum", "local.weight_decay", "local.clip_norm", "local.schedule", "local.proximal_mu",
    "channel.name", "downlink.noise", "downlink.missing_rate",
)  # fmt: skip
"""Those of them that are told where they are not the paper's."""
MARKS = "†‡§¶#"
_REMARKS = {
    "nothing_shared": "in some rounds clients got back what they had sent, or nothing of others",
    "dropped_uploads": "uploads were dropped",
    "diverged": "the solver diverged",
    "changed_code": "a part of somebody's own was changed on the way",
}


@dataclass(frozen=True)
class Entry:
    """One method in one column.

    Attributes:
        value: over seeds; accuracies in percent.
        leads: whether no other method of the column has a better mean, of percentages to the two decimals shown; none
            has one of a metric of which neither more nor less is better.
        best: whether it is better than every other method of the column by more than chance: the interval of each
            paired difference, corrected for their number, leaves out zero.
        paper: the paper's number, or None.
        pair: this method minus the reference on equal seeds, None for the reference and where no seed is shared.
        worst: the worst client, over seeds; None where not measured.
        decile: the mean of the worst tenth of the clients.
        marks: places of the table's remarks that hold for runs of this cell.
    """

    value: Mean
    leads: bool
    best: bool
    paper: float | None
    pair: Difference | None
    worst: Mean | None = None
    decile: Mean | None = None
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table, independent of how it is written.

    Attributes:
        protocol: what is measured and how, one sentence an item.
        rows: method labels, top to bottom.
        columns: data set, noise level and missing rate, left to right.
        entries: (label, column) -> entry; an absent key is a cell without a finished run.
        metric: name of the metric.
        reference: label of the method that the others are compared with; None where there is none.
        remarks: what the marks stand for, one sentence an item.
        against_leader: column -> method -> the leading method minus that one.
        paper_heading: heading of the paper's numbers, which says where they are for more data.
        titles: label -> what its row is called, where that is not the label.
    """

    protocol: list[str]
    rows: list[str]
    columns: list[Column]
    entries: dict[tuple[str, Column], Entry]
    metric: str
    reference: str | None = None
    remarks: list[str] = field(default_factory=list)
    against_leader: dict[Column, dict[str, Difference]] = field(default_factory=dict)
    paper_heading: str = "paper"
    titles: Mapping[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """The per cent sign for accuracies, else an empty string."""
        return "%" if in_percent(self.metric) else ""

    def title(self, label: str) -> str:
        """Return what the row of a method is called."""
        return self.titles.get(label, label)

    @property
    def reference_title(self) -> str:
        """What the row of the reference is called."""
        return "nothing" if self.reference is None else self.title(self.reference)

    @property
    def has_pairs(self) -> bool:
        """Whether any method shares a seed with the reference."""
        return any(entry.pair is not None for entry in self.entries.values())

    @property
    def caption(self) -> str:
        """What the table shows, in one sentence."""
        unit = ", in percent" if self.unit else ""
        seeds = over_seeds(entry.value.n for entry in self.entries.values())
        return f"{_capital(in_words(self.metric))} {when(self.metric)}{unit}: {seeds}"


Values = Mapping[tuple[str, Column], dict[Hashable, float]]


def _table(block: Block, metric: str, reference: str | None, called: Mapping[str, str]) -> Table:
    """Return the table of a block of runs; where `reference` has no runs here, it is jgesr, or else the first row."""
    scale = 100.0 if in_percent(metric) else 1.0
    values = _values(block, metric, scale)
    labels = [label for label in block.labels if any(row == label for row, _ in values)]
    if reference not in labels:
        reference = PROPOSED if PROPOSED in labels else labels[0] if len(labels) > 1 else None
    pairs = corrected(
        {
            (label, column): pair
            for (label, column), seeds in values.items()
            if label != reference and (pair := paired(seeds, values.get((reference or "", column), {}))) is not None
        }
    )
    plain = averaged(metric)[0]
    base, _, how = plain.partition("_")
    over = metric.removeprefix(plain)
    beside = {} if how not in ("", "weighted") or scale == 1 else {
        name: _values(block, f"{base}_{name}{over}", scale) for name in ("worst", "worst_decile")
    }  # fmt: skip
    kinds, remarks = _remarks(block)
    entries: dict[tuple[str, Column], Entry] = {}
    against_leader = {}
    shared = block.runs[0].protocol
    with_paper = metric in PAPERS_METRICS and is_papers(shared)
    for column in block.columns:
        means = {label: mean_of(list(values[label, column].values())) for label in labels if (label, column) in values}
        leaders, ahead = _leader(means, values, column, metric)
        if ahead:
            against_leader[column] = ahead
        for label, mean in means.items():
            seeds = {name: list(found.get((label, column), {}).values()) for name, found in beside.items()}
            worst, decile = (mean_of(seeds[name]) if seeds.get(name) else None for name in ("worst", "worst_decile"))
            entries[label, column] = Entry(
                value=mean,
                leads=label in leaders,
                best=leaders == [label] and bool(ahead) and all(clear_lead(one, metric) for one in ahead.values()),
                paper=NUMBERS.get((label, column)) if with_paper else None,
                pair=pairs.get((label, column)),
                worst=worst,
                decile=decile,
                marks=kinds.get((label, column), ()),
            )
    called = {label: title for label, title in called.items() if label in labels}
    protocol = _protocol(block, metric, called)
    heading = "paper, all data" if departures(shared) else "paper"
    return Table(protocol, labels, block.columns, entries, metric, reference, remarks, against_leader, heading, called)


def _values(block: Block, metric: str, scale: float) -> Values:
    """Return (label, column) -> seed -> value, where anything was measured."""
    found = {
        (label, column): seed_means(block.cell(label, column), metric)
        for label in block.labels
        for column in block.columns
    }
    return {key: {seed: scale * value for seed, value in seeds.items()} for key, seeds in found.items() if seeds}


def _leader(
    means: Mapping[str, Mean], values: Values, column: Column, metric: str
) -> tuple[list[str], dict[str, Difference]]:
    """Return the methods with the best mean, and the first of them minus each other, corrected for their number.

    A method that shares no two seeds with the leading one cannot be told apart from it: its difference has no interval.
    Of a metric of which neither more nor less is better there are none.
    """
    more = higher_is_better(metric)
    if more is None:
        return [], {}
    shown_as = {
        label: round(mean.mean, 2) if in_percent(metric) else rounded(mean.mean) for label, mean in means.items()
    }
    best = (max if more else min)(shown_as.values(), default=None)
    leaders = [label for label in means if shown_as[label] == best]
    if len(means) < 2:
        return leaders, {}
    first = leaders[0]
    family = {
        label: paired(values[first, column], values[label, column])
        or Difference(means[first].mean - means[label].mean, None, 0)
        for label in means
        if label != first
    }
    return leaders, corrected(family)


def in_percent(metric: str) -> bool:
    """Return whether a metric is shown in percent, an accuracy that is."""
    return metric.startswith("accuracy/")


def clear_lead(one: Difference, metric: str) -> bool:
    """Return whether a difference is an advantage, and clear after the correction.

    Of the method with the best mean over its own seeds it need not be, over those that both have.
    """
    return one.clear_of_all and (one.mean > 0) == higher_is_better(metric)


def seed_means(runs: Iterable[Run], metric: str) -> dict[Hashable, float]:
    """Return seed -> value of the last round; where settings differ by rounding, the mean over a seed's runs."""
    values: dict[Hashable, list[float]] = {}
    for run in runs:
        if (value := run.last(metric)) is not None:
            values.setdefault(run.seed, []).append(value)
    return {seed: sum(held) / len(held) for seed, held in values.items()}


def remarks_of(run: Run) -> dict[str, str]:
    """Return kind -> text of what a run met; dropped uploads also where an older summary lists them only."""
    found = {
        str(remark.get("kind", "remark")): shown(remark.get("text") or _REMARKS.get(str(remark.get("kind")), ""))
        for remark in run.summary.get("remarks") or []
    }
    dropped = run.summary.get("dropped_uploads")
    if "remarks" not in run.summary and isinstance(dropped, Mapping) and dropped:
        found["dropped_uploads"] = f"uploads were dropped in {len(dropped)} round{'' if len(dropped) == 1 else 's'}"
    return found


def _remarks(block: Block) -> tuple[dict[tuple[str, Column], tuple[int, ...]], list[str]]:
    """Return (label, column) -> marks, and what each mark says."""
    met: dict[str, list[tuple[str, Column, str]]] = {}
    for label in block.labels:
        for column in block.columns:
            for run in block.cell(label, column):
                for kind, text in remarks_of(run).items():
                    met.setdefault(kind, []).append((label, column, f"{run.name}: {text}"))
    order = [*(kind for kind in _REMARKS if kind in met), *sorted(met.keys() - _REMARKS.keys())]
    marks: dict[tuple[str, Column], tuple[int, ...]] = {}
    lines = []
    for place, kind in enumerate(order):
        for label, column, _ in met[kind]:
            marks[label, column] = (*(p for p in marks.get((label, column), ()) if p != place), place)
        texts = [text for _, _, text in met[kind]]
        more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
        lines.append(f"{mark_text((place,))} {_REMARKS.get(kind, shown(kind))}: {'; '.join(texts[:5])}{more}")
    return marks, lines


def mark_text(marks: Sequence[int]) -> str:
    """Return the signs of a table's remarks, doubled where there are more than signs."""
    return "".join(MARKS[place % len(MARKS)] * (1 + place // len(MARKS)) for place in marks)


def describe(metric: str) -> str:
    """Return what a metric is, in words.

    >>> describe("accuracy/received_weighted")
    'local test accuracy of the model each client receives from the server, sample-weighted mean over clients'
    """
    quantity, _, rest = averaged(metric)[0].partition("/")
    which, _, how = rest.partition("_")
    models = {
        "received": "the model each client receives from the server",
        "trained": "each client's own model after local training",
    }
    means = {
        "": "plain mean over clients",
        "weighted": "sample-weighted mean over clients",
        "std": "standard deviation over clients",
        "worst": "worst client",
        "worst_decile": "mean of the worst tenth of the clients",
    }
    if quantity not in ("accuracy", "loss") or which not in models or how not in means:
        return metric
    return f"local test {quantity} of {models[which]}, {means[how]}"


def in_words(metric: str) -> str:
    """Return what a metric is, with its name, where that says more than its name."""
    words = describe(metric)
    return metric if words == metric else f"{words} ({metric})"


def when(metric: str) -> str:
    """Return of which rounds a metric is.

    >>> when("accuracy/trained"), when("accuracy/trained@5")
    ('after the last round', 'as mean over the last 5 evaluations')
    """
    count = averaged(metric)[1]
    return f"as mean over the last {count} evaluations" if count > 1 else "after the last round"


def _protocol(block: Block, metric: str, called: Mapping[str, str]) -> list[str]:
    runs = block.runs
    shared = runs[0].protocol
    lasts = sorted({run.last_round for run in runs})
    counts = sorted({len(block.by_seed(label, column)) for label in block.labels for column in block.columns} - {0})
    rounds = " or ".join(map(str, lasts))
    bold = "; bold: better than every other method of its column, by paired 95 % intervals corrected for their number"
    bold = "" if higher_is_better(metric) is None else f"{bold} (Holm)"
    lines = [
        f"{in_words(metric)}, {when(metric)} ({rounds} of {shared.get('rounds')}), never the best one",
        f"{over_seeds(counts)}{f' ({span(counts)})' if len(counts) > 1 else ''}{bold}",
    ]
    if called:
        lines.append(f"called as in the study's file: {told(called)}")
    used = [run.config["aggregator"] for run in runs]
    if any(one["name"] in ("jgesr", "two_step") and one.get("fidelity") == "shares" for one in used):
        lines.append("jgesr and two_step weigh fidelity as the paper prints it (shares) unless the row says otherwise")
    lines.append(protocol_text(shared))
    if terms := _client_terms(runs, called):
        lines.append(f"added to the clients' loss: {terms}")
    comparable = any((label, column) in NUMBERS for label in block.labels for column in block.columns)
    if comparable and (changed := departures(shared)):
        what = "for other settings" if is_papers(shared) else "left out, as they are for other settings"
        lines.append(f"the paper's numbers are {what}: here {', '.join(changed)}")
    if block.differs:
        lines.append("this table differs from the others in " + ", ".join(f"{k}={v}" for k, v in block.differs.items()))
    return [shown(line, 2000) for line in lines if line]


def told(called: Mapping[str, str]) -> str:
    """Return what methods are called by, each with its label."""
    return "; ".join(f"{called[label]}: {label}" for label in sorted(called, key=method_rank))


def _client_terms(runs: Sequence[Run], called: Mapping[str, str]) -> str:
    """Return what methods add to their clients' loss, where the summaries say so."""
    added = {run.label: run.summary.get("client_terms") for run in runs}
    return "; ".join(
        f"{called.get(label, label)}: {', '.join(map(str, terms))}"
        for label, terms in sorted(added.items(), key=lambda item: method_rank(item[0]))
        if isinstance(terms, list) and terms
    )


def protocol_text(shared: Mapping[str, Any]) -> str:
    """Return the settings that readers ask for first."""
    partition = shared.get("data.partition", "dirichlet")
    unused = {"data.partition"} if partition == "dirichlet" else set()
    unused |= {key for key, uses in USED_BY.items() if partition not in uses}
    unused |= set() if shared.get("data.planted") else {"data.planted", "data.groups"}
    unused |= set(TOLD_WHERE_OTHER) - different(shared).keys()
    told = {word: shared[key] for key, word in SETTING_WORDS.items() if key in shared and key not in unused}
    told |= {key.removeprefix("channel."): value for key, value in shared.items() if _of_a_link(key)}
    return ", ".join(f"{word} {part(value)}" for word, value in told.items())


def _of_a_link(key: str) -> bool:
    """Whether a setting is one of a link of somebody's own; noise and missing rate stand in a table's columns."""
    return key.startswith("channel.") and key != "channel.name"


def over_seeds(counts: Iterable[int]) -> str:
    """Return over how many seeds cells are means, with their deviation; or, where that differs, that they say it.

    >>> over_seeds([3, 3]), over_seeds([1])
    ('mean ± sample standard deviation over 3 seeds', 'one seed')
    >>> over_seeds([2, 3])
    'mean ± sample standard deviation over seeds, their number in brackets'
    """
    found = set(counts)
    if found == {1}:
        return seeds_text(1)
    seeds = seeds_text(*found) if len(found) == 1 else "seeds, their number in brackets"
    return f"mean ± sample standard deviation over {seeds}"


def seeds_text(count: int) -> str:
    """Return a number of seeds in words."""
    return "one seed" if count == 1 else f"{count} seeds"


def span(counts: Sequence[int]) -> str:
    """Return the least and the greatest of some numbers, in ascending order, as text."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def column_title(column: Column) -> str:
    """Return a column's heading."""
    missing = f" missing={number_text(column.missing)}" if column.missing else ""
    return f"{part(column.data)} s={number_text(column.noise)}{missing}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if "/" not in text.partition(" ")[0] else text


def _leading_metric(runs: Sequence[Run]) -> str:
    """Return the metric that tables and figures lead with: what most of the runs name."""
    named = Counter(str(run.config.get("metric") or METRIC) for run in runs)
    return named.most_common(1)[0][0] if named else METRIC


def accuracies_only(metric: str) -> None:
    """Raise ConfigError where a metric is no accuracy."""
    if not in_percent(metric):
        raise ConfigError(f"--metric is {metric!r}; maps and figures show accuracies, such as {METRIC}")


@dataclass(frozen=True)
class Findings:
    """The tables of some folders, and what they come from.

    Attributes:
        tables: one a block of comparable runs.
        collection: the runs, and the lines about those left out.
        metric: what the tables show.
    """

    tables: list[Table]
    collection: Collection
    metric: str


def tables_of(
    roots: Sequence[str | Path], metric: str | None = None, reference: str | None = None, drawn: bool = False
) -> Findings:
    """Return the tables of the runs below some folders or in some files of stored results.

    Args:
        roots: the folders and files.
        metric: a metric of the last round, with "@N" its mean over the last N evaluations; None: the one that the
            runs name.
        reference: label of the method that the others are compared with; None: the first of the study's file, if the
            runs are a study's.
        drawn: whether figures of the metric follow, so that runs whose files for them are damaged are left out, as
            they are where a mean over evaluations is asked for.

    Raises:
        ConfigError: a folder that is not there, no finished run, or a metric or method that none of them has.
    """
    wanted = METRIC if metric is None else metric
    collection = collect(roots, wanted if drawn or averaged(wanted)[1] > 1 else None)
    if metric is None:
        metric = _leading_metric(collection.runs)
    if not collection.runs:
        why = f" ({'; '.join(collection.notes)})" if collection.notes else ""
        raise ConfigError(f"no finished run in {', '.join(map(shown, roots))}{why}")
    without = [run for run in collection.runs if run.last(metric) is None]
    if len(without) == len(collection.runs):
        raise ConfigError(_nowhere(collection.runs, metric))
    lacking: dict[str, list[str]] = {}
    for run in without:
        lacking.setdefault(_lacking(run, metric), []).append(run.name)
    notes = [*collection.notes, *(f"{_few(names)}: {why}; left out" for why, names in lacking.items())]
    collection = replace(collection, runs=[run for run in collection.runs if run not in without], notes=notes)
    labels = {run.label for run in collection.runs}
    if reference is not None:
        reference = collection.label_of(reference)
    reference = reference or next((label for label in collection.order if label in labels), None)
    tables = [_table(block, metric, reference, collection.titles) for block in blocks(collection.runs)]
    return Findings(tables, collection, metric)


def _few(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _lacking(run: Run, metric: str) -> str:
    """Return why a run has no value of a metric."""
    name, count = averaged(metric)
    if name not in run.measured:
        return f"{metric} was not measured"
    if run.last(name) is None:
        return f"{name} is not finite"
    if run.source.history(name) is None:
        return f"no curve of {name} is kept"
    return f"not all of the last {count} evaluations have a finite {name}"


def _nowhere(runs: Sequence[Run], metric: str) -> str:
    """Return why none of the runs has a value of a metric, and what would do."""
    name, count = averaged(metric)
    ending = [run for run in runs if run.last(name) is not None]
    if ending and all(run.source.history(name) is None for run in ending):
        return (
            f"no curve of {name} is kept with the runs (files of stored results have those of accuracies and losses at "
            f"most); give the runs' folders, or --metric {name} without @{count}"
        )
    if ending:
        return f"no run ends with {count} finite evaluations of {name}; ask for the mean over fewer"
    known = sorted({name for run in runs for name in run.measured})
    if name in known:
        return f"{name} is not finite at the end of any run; ask for an accuracy, such as {METRIC}"
    return f"no run has the metric {shown(metric)!r}{nearest(metric, known)}; known: {', '.join(known)}"

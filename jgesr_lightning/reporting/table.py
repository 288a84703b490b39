"""Tables of finished runs: means over seeds beside the paper's numbers, and paired differences to jgesr.

``python -m jgesr_lightning table runs/ [--format md|csv|latex|all] [--metric accuracy/received] [--out DIR]``
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.identity import number_text
from jgesr_lightning.paths import user_path
from jgesr_lightning.reporting.paper import departures, paper_value
from jgesr_lightning.reporting.runs import Block, Collection, Column, blocks, collect
from jgesr_lightning.reporting.statistics import Difference, Mean, mean_of, paired
from jgesr_lightning.reporting.text import markdown_text, shown, tex_text
from jgesr_lightning.runtime.files import write_text

METRIC = "accuracy/received"
PAPERS_METRICS = tuple(f"accuracy/{which}{how}" for which in ("received", "trained") for how in ("", "_weighted"))
"""What the paper's numbers may be: means over clients; it does not say of which models, nor how they are weighed."""
REFERENCE = "jgesr"
ABSENT = "\u2013"


@dataclass(frozen=True)
class Entry:
    """One method in one column.

    Attributes:
        value: over seeds; accuracies in percent.
        best: whether no other method of the column has a better mean, to the two decimals shown; never for one alone.
        paper: the paper's number, or None.
        to_reference: jgesr minus this method on equal seeds, None for jgesr itself and where no seed is shared.
    """

    value: Mean
    best: bool
    paper: float | None
    to_reference: Difference | None


@dataclass(frozen=True)
class Table:
    """A table, independent of how it is written.

    Attributes:
        protocol: what is measured and how, one sentence an item.
        rows: method labels, top to bottom.
        columns: data set, noise level and missing rate, left to right.
        entries: (label, column) -> entry; an absent key is a cell without a finished run.
        unit: "%" for accuracies, else "".
        metric: name of the metric.
    """

    protocol: list[str]
    rows: list[str]
    columns: list[Column]
    entries: dict[tuple[str, Column], Entry]
    unit: str
    metric: str

    @property
    def has_pairs(self) -> bool:
        """Whether any method shares a seed with the reference."""
        return any(entry.to_reference is not None for entry in self.entries.values())


def build(block: Block, metric: str = METRIC) -> Table:
    """Return the table of a block of runs for a metric of the last round."""
    scale = 100.0 if metric.startswith("accuracy/") else 1.0
    better = max if metric.startswith("accuracy/") else min
    seeds: dict[tuple[str, Column], dict[Hashable, float]] = {}
    for label in block.labels:
        for column in block.columns:
            measured: dict[Hashable, float] = {
                seed: scale * value for seed, value in seed_values(block, label, column, metric).items()
            }
            if measured:
                seeds[label, column] = measured
    entries: dict[tuple[str, Column], Entry] = {}
    for column in block.columns:
        means = {
            label: mean_of(list(seeds[label, column].values())) for label in block.labels if (label, column) in seeds
        }
        best = better((round(mean.mean, 2) for mean in means.values()), default=None)
        for label, mean in means.items():
            reference = None if label == REFERENCE else seeds.get((REFERENCE, column))
            entries[label, column] = Entry(
                value=mean,
                best=len(means) > 1 and round(mean.mean, 2) == best,
                paper=paper_value(label, column) if metric in PAPERS_METRICS else None,
                to_reference=None if reference is None else paired(reference, seeds[label, column]),
            )
    unit = "%" if scale == 100 else ""
    return Table(_protocol(block, metric), block.labels, block.columns, entries, unit, metric)


def seed_values(block: Block, label: str, column: Column, metric: str) -> dict[Hashable, float]:
    """Return seed -> value of the last round; where settings differ by rounding, the mean over a seed's runs."""
    values = {
        seed: [value for run in runs if (value := run.last(metric)) is not None]
        for seed, runs in block.by_seed(label, column).items()
    }
    return {seed: sum(held) / len(held) for seed, held in values.items() if held}


def describe(metric: str) -> str:
    """Return what a metric is, in words.

    >>> describe("accuracy/received_weighted")
    'local test accuracy of the model each client receives from the server, sample-weighted mean over clients'
    """
    quantity, _, rest = metric.partition("/")
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


def _protocol(block: Block, metric: str) -> list[str]:
    runs = block.runs
    shared = runs[0].protocol
    lasts = sorted({run.summary["last"]["round"] for run in runs})
    counts = sorted({len(block.cell(label, column)) for label in block.labels for column in block.columns} - {0})
    rounds = " or ".join(map(str, lasts))
    lines = [
        f"{describe(metric)} ({metric}), at the last round ({rounds} of {shared.get('rounds')}), never the best one",
        f"mean ± sample standard deviation over seeds, number of seeds in brackets ({_span(counts)})",
    ]
    if {"jgesr", "two_step"} & set(block.labels):
        lines.append("jgesr and two_step weigh fidelity as the paper prints it (shares) unless the row says otherwise")
    named = {
        "clients": "clients", "data.kappa": "Dirichlet kappa", "data.fraction": "part of the training data",
        "model.name": "network", "local.epochs": "local epochs", "local.batch_size": "batch size",
        "local.lr": "learning rate", "participation": "participation",
    }  # fmt: skip
    lines.append(", ".join(f"{word} {shared[key]}" for key, word in named.items() if key in shared))
    if changed := departures(shared):
        lines.append(f"the paper's numbers are for other settings: here {', '.join(changed)}")
    if block.differs:
        lines.append("this table differs from the others in " + ", ".join(f"{k}={v}" for k, v in block.differs.items()))
    return [line for line in lines if line]


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def column_title(column: Column) -> str:
    """Return a column's heading."""
    data, noise, missing = column
    return f"{data} s={number_text(noise)}" + (f" missing={number_text(missing)}" if missing else "")


def value_text(value: Mean, plus_minus: str = "±") -> str:
    """Return ``mean ± deviation``, without a deviation for a single seed."""
    return f"{value.mean:.2f}" + (f" {plus_minus} {value.std:.2f}" if value.std is not None else "")


def difference_text(difference: Difference | None) -> str:
    """Return a paired difference with its interval, such as ``+1.20 [+0.70, +1.70] (3)``."""
    if difference is None:
        return ABSENT
    text = f"{difference.mean:+.2f}"
    if difference.half_width is not None:
        low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
        text += f" [{low:+.2f}, {high:+.2f}]"
    return f"{text} ({difference.n})"


PAIRED_TITLE = (
    "jgesr minus each method on equal seeds, in {unit}, with its 95 % confidence interval (Student's t) and the number "
    "of seeds; an interval that leaves out zero is marked *"
)


def paired_title(table: Table) -> str:
    """Return what the table of differences shows."""
    return PAIRED_TITLE.format(unit="percentage points" if table.unit else "the metric's unit")


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    lines = [f"- {markdown_text(line)}" for line in table.protocol] + [""]
    head = ["method"]
    for column in table.columns:
        head.append(f"{markdown_text(column_title(column))}{' (%)' if table.unit else ''}")
        head += ["paper", "difference"] if shows_paper(table, column) else []
    lines += [_md_row(head), _md_row(["---", *["---:"] * (len(head) - 1)])]
    for label in table.rows:
        cells = [markdown_text(label)]
        for column in table.columns:
            entry = table.entries.get((label, column))
            text = ABSENT
            if entry is not None:
                text = value_text(entry.value)
                text = f"{f'**{text}**' if entry.best else text} ({entry.value.n})"
            cells.append(text)
            if shows_paper(table, column):
                cells += [paper_text(label, column), difference_to_paper(entry, label, column)]
        lines.append(_md_row(cells))
    if table.has_pairs:
        lines += ["", f"{_capital(paired_title(table))}:", ""]
        lines += [_md_row(["method", *(markdown_text(column_title(column)) for column in table.columns)])]
        lines += [_md_row(["---", *["---:"] * len(table.columns)])]
        lines += [_md_row([markdown_text(label), *texts]) for label, texts in paired_rows(table)]
    return "\n".join(lines) + "\n"


def paired_rows(table: Table) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of differences."""
    rows = []
    for label in table.rows:
        if label == REFERENCE:
            continue
        found = [table.entries.get((label, column)) for column in table.columns]
        differences = [None if entry is None else entry.to_reference for entry in found]
        rows.append((label, [difference_text(d) + (" *" if d is not None and d.clear else "") for d in differences]))
    return rows


def csv_text(tables: Sequence[Table]) -> str:
    """Return tables as one CSV text in long form: one row a method and column."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["table", "metric", "method", "data", "noise", "missing_rate", "seeds", "mean", "std", "best", "paper",
         "difference_to_paper", "jgesr_minus_method", "ci95_low", "ci95_high", "paired_seeds", "protocol"]
    )  # fmt: skip
    for number, table in enumerate(tables, 1):
        for (label, column), entry in table.entries.items():
            mean, pair, paper = entry.value, entry.to_reference, entry.paper
            half = None if pair is None else pair.half_width
            writer.writerow(
                [number, table.metric, label, *column, mean.n, repr(mean.mean), _number(mean.std), int(entry.best),
                 _number(paper), _number(None if paper is None else mean.mean - paper),
                 _number(None if pair is None else pair.mean),
                 _number(None if pair is None or half is None else pair.mean - half),
                 _number(None if pair is None or half is None else pair.mean + half),
                 "" if pair is None else pair.n, "; ".join(table.protocol)]
            )  # fmt: skip
    return text.getvalue()


def latex(table: Table) -> str:
    """Return a table as LaTeX (package booktabs); the differences follow as a second tabular."""
    widths = ["r" * (3 if shows_paper(table, column) else 1) for column in table.columns]
    head, rule = ["method"], []
    at = 2
    for column, width in zip(table.columns, widths, strict=True):
        head.append(rf"\multicolumn{{{len(width)}}}{{c}}{{{tex_text(column_title(column))}}}")
        rule.append(rf"\cmidrule(lr){{{at}-{at + len(width) - 1}}}")
        at += len(width)
    under = [""]
    for width in widths:
        under += ["measured", "paper", "diff."] if len(width) == 3 else ["measured"]
    lines = [f"% {shown(line, 2000)}" for line in table.protocol]
    lines += [rf"\begin{{tabular}}{{l{''.join(widths)}}}", r"\toprule", _tex_row(head), "".join(rule), _tex_row(under)]
    lines.append(r"\midrule")
    for label in table.rows:
        cells = [tex_text(label)]
        for column in table.columns:
            entry = table.entries.get((label, column))
            text = "--"
            if entry is not None:
                text = value_text(entry.value, r"$\pm$")
                text = rf"\textbf{{{text}}}" if entry.best else text
            cells.append(text)
            if shows_paper(table, column):
                beside = paper_text(label, column), difference_to_paper(entry, label, column)
                cells += [text.replace(ABSENT, "--") for text in beside]
        lines.append(_tex_row(cells))
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.has_pairs:
        lines += ["", f"% {paired_title(table)}", rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
        lines += [_tex_row(["method", *(tex_text(column_title(column)) for column in table.columns)]), r"\midrule"]
        for label, texts in paired_rows(table):
            lines.append(_tex_row([tex_text(label), *(tex_text(text).replace(ABSENT, "--") for text in texts)]))
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def notes_text(collection: Collection) -> list[str]:
    """Return the notes on runs that are left out."""
    return [f"note: {note}" for note in collection.notes]


def shows_paper(table: Table, column: Column) -> bool:
    """Return whether the paper has a number for any row of a column."""
    return table.metric in PAPERS_METRICS and any(paper_value(label, column) for label in table.rows)


def paper_text(label: str, column: Column) -> str:
    """Return the paper's number for a cell."""
    paper = paper_value(label, column)
    return ABSENT if paper is None else f"{paper:.2f}"


def difference_to_paper(entry: Entry | None, label: str, column: Column) -> str:
    """Return by how much a measured mean differs from the paper's number."""
    paper = paper_value(label, column)
    return ABSENT if paper is None or entry is None else f"{entry.value.mean - paper:+.2f}"


def _md_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith("jgesr") else text


def _all_markdown(tables: Sequence[Table], notes: Sequence[str]) -> str:
    text = "\n".join(markdown(table) for table in tables)
    return text + ("\n" + "\n".join(f"- {markdown_text(note)}" for note in notes) + "\n" if notes else "")


def _all_latex(tables: Sequence[Table], notes: Sequence[str]) -> str:
    return "\n".join(latex(table) for table in tables) + "".join(f"% {shown(note, 2000)}\n" for note in notes)


WRITERS: Mapping[str, tuple[str, Callable[[Sequence[Table], Sequence[str]], str]]] = {
    "md": ("table.md", _all_markdown),
    "csv": ("table.csv", lambda tables, notes: csv_text(tables)),
    "latex": ("table.tex", _all_latex),
}


def tables_of(roots: Sequence[str | Path], metric: str = METRIC, drawn: bool = False) -> tuple[list[Table], Collection]:
    """Return the tables of the runs below some folders, and the collection they come from.

    Args:
        roots: the folders.
        metric: a metric of the last round.
        drawn: whether figures of the metric follow, so that runs whose files for them are damaged are left out.

    Raises:
        ConfigError: a folder that is not there, no finished run, or a metric that none of them has.
    """
    collection = collect(roots, metric if drawn else None)
    if not collection.runs:
        why = f" ({'; '.join(collection.notes)})" if collection.notes else ""
        raise ConfigError(f"no finished run in {', '.join(map(str, roots))}{why}")
    without = [run.name for run in collection.runs if run.last(metric) is None]
    if len(without) == len(collection.runs):
        known = sorted({name for run in collection.runs for name in run.summary["last"] if name != "round"})
        raise ConfigError(f"no run has the metric {metric!r}{nearest(metric, known)}; known: {', '.join(known)}")
    notes = [*collection.notes, *(f"{name}: {metric} was not measured; left out" for name in without)]
    kept = [run for run in collection.runs if run.name not in without]
    return [build(block, metric) for block in blocks(kept)], Collection(kept, notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the runs below some folders, and write them to files where asked."""
    parser = argparse.ArgumentParser(prog="python -m jgesr_lightning table", description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=user_path, nargs="+", metavar="RUNS", help="folder with runs, at any depth")
    parser.add_argument("--format", choices=[*WRITERS, "all"], default="md", help="what is printed, or written (md)")
    parser.add_argument("--metric", default=METRIC, help=f"a name in the runs' summaries ({METRIC})")
    parser.add_argument("--out", type=user_path, metavar="DIR", help="write table.md, table.csv, table.tex there")
    arguments = parser.parse_args(argv)
    tables, collection = tables_of(arguments.folders, arguments.metric)
    notes = notes_text(collection)
    for kind in WRITERS if arguments.format == "all" else [arguments.format]:
        name, write = WRITERS[kind]
        text = write(tables, notes)
        if arguments.out is None:
            print(text)
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_text(arguments.out / name, text)
            print(f"wrote {arguments.out / name}")
    if arguments.out is not None or arguments.format == "csv":  # else they stand below the table
        for note in notes:
            print(note, file=sys.stderr)
    return 0

"""One table, and what its runs took, as rows of cells, and those as Markdown and LaTeX; CSV has full numbers.

The page writes the same rows as Markdown and LaTeX have.

pandas, which writes Markdown and LaTeX too, escapes neither for Markdown nor sets headings over several columns with
rules below them without more code than this.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jgesr_lightning.reporting.runs import Block, Run
from jgesr_lightning.reporting.statistics import Difference, Mean
from jgesr_lightning.reporting.tables import Entry, Table, column_title, mark_text
from jgesr_lightning.reporting.text import markdown_text, shown, tex_text

ABSENT = "\u2013"
PREAMBLE = r"% needs \usepackage{booktabs}"
_DIAGNOSTICS = (  # heading, metric of the last round, or the part of a run whose seconds they are; form
    ("seconds", "total", ".3g"),
    ("training", "train", ".3g"),
    ("aggregation", "aggregate", ".3g"),
    ("iterations", "aggregator/iterations", ".0f"),
    ("converged", "aggregator/converged", ".0%"),
    ("residual of models", "aggregator/stationarity_models", ".1e"),
    ("residual of graph", "aggregator/stationarity_graph", ".1e"),
    ("objective", "aggregator/objective", ".4g"),
    ("edges", "aggregator/edges", ".0f"),
)


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what stands in it.
        bold: whether it is set in bold.
        marks: signs of remarks, or stars.
        count: how many seeds it is of, where that is told.
        kind: "value", "beside" (context of a value), "words" (the same, with names, in several lines) or "label".
    """

    text: str
    bold: bool = False
    marks: str = ""
    count: str = ""
    kind: str = "value"

    @property
    def beside(self) -> str:
        """What follows in plain type."""
        return f"{self.marks} ({self.count})" if self.count else self.marks


@dataclass(frozen=True)
class Grid:
    """A table as it is written.

    Attributes:
        caption: what it shows.
        groups: headings over the columns, and the headings of the columns below each.
        rows: a label and a cell for each column.
        footnotes: what the marks say.
        label: short name, for references.
        corner: heading of the rows.
    """

    caption: str
    groups: list[tuple[str, list[str]]]
    rows: list[list[Cell]]
    footnotes: list[str]
    label: str
    corner: str = "method"


def main_grid(table: Table) -> Grid:
    """Return means over seeds, the paper's numbers, and the clients served worst."""
    groups = []
    rows = [[Cell(table.title(label), kind="label")] for label in table.rows]
    unit = f" ({table.unit})" if table.unit else ""
    form = number_form(table.unit)
    beside = [("worst client", "worst"), ("worst decile", "decile")]
    if all(entry.worst == entry.decile for entry in table.entries.values()):  # as it is of up to ten clients
        beside.pop()
    for column in table.columns:
        entries = [table.entries.get((label, column)) for label in table.rows]
        headings = [f"measured{unit}"]
        cells = [[_value(entry, form)] for entry in entries]
        if any(entry is not None and entry.paper is not None for entry in entries):
            headings += [table.paper_heading, "minus paper"]
            for entry, line in zip(entries, cells, strict=True):
                paper = None if entry is None else entry.paper
                line += [_beside(paper, ".2f"), _beside(_minus(entry, paper), "+.2f")]
        for heading, name in beside:
            found: list[Mean | None] = [None if entry is None else getattr(entry, name) for entry in entries]
            if any(found):
                headings.append(heading)
                for mean, line in zip(found, cells, strict=True):
                    line.append(_beside(None if mean is None else mean.mean, ".2f"))
        groups.append((column_title(column), headings))
        for row, line in zip(rows, cells, strict=True):
            row += line
    return Grid(table.caption, groups, rows, table.remarks, "results")


def paired_grid(table: Table) -> Grid:
    """Return the differences to the reference, each interval by itself and corrected for their number."""
    unit = "percentage points" if table.unit else "the metric's unit"
    pairs = [entry.pair for entry in table.entries.values() if entry.pair is not None]
    several = any(pair.half_width is not None for pair in pairs)
    counts = {pair.n for pair in pairs}
    each = f" ({counts.pop()} each)" if len(counts) == 1 else ", their number in brackets"
    caption = f"{table.reference_title} subtracted from each method on equal seeds{each}, in {unit}: mean difference"
    caption += (
        " with its 95 % confidence interval (Student's t), then the interval corrected for the number of differences "
        "in the table (Holm); * marks intervals that leave out zero"
        if several
        else "; one seed has no interval"
    )
    headings = ["difference", "corrected"] if several else ["difference"]
    groups = [(column_title(column), headings) for column in table.columns]
    rows = []
    for label in table.rows:
        if label == table.reference:
            continue
        row = [Cell(table.title(label), kind="label")]
        for column in table.columns:
            entry = table.entries.get((label, column))
            row += _pair(None if entry is None else entry.pair, number_form(table.unit))[: len(headings)]
        rows.append(row)
    same = any(pair.n > 1 and pair.half_width is None for pair in pairs)
    notes = ["without an interval: the same difference on every seed tells nothing of chance"] if same else []
    return Grid(caption, groups, rows, notes, "differences", corner=f"method minus {table.reference_title}")


def diagnostics(block: Block, table: Table) -> Grid:
    """Return seconds and the last aggregation's diagnostics, means over seeds; columns without a value are left out."""
    rows = [[Cell(table.title(label), kind="label")] for label in table.rows]
    groups = []
    for column in table.columns:
        cells = [block.cell(label, column) for label in table.rows]
        found = [
            (heading, [_mean([_reported(run, name) for run in runs]) for runs in cells], form)
            for heading, name, form in _DIAGNOSTICS
        ]
        kept = [item for item in found if any(value is not None for value in item[1])]
        if not kept:
            continue
        groups.append((column_title(column), [heading for heading, _, _ in kept]))
        for _, values, form in kept:
            for row, value in zip(rows, values, strict=True):
                row.append(Cell(ABSENT if value is None else format(value, form)))
    caption = (
        "Seconds of a run, and the aggregation of the last round: means over seeds, converged as a share of them; "
        "residuals: by how much the optimality conditions of J fail, as a share of their terms"
    )
    if not any("residual" in heading for _, headings in groups for heading in headings):
        caption = caption.partition(";")[0]
    return Grid(caption, groups, rows, [], "diagnostics")


def _reported(run: Run, name: str) -> float | None:
    if "/" in name:
        return run.last(name)
    value = run.summary.get("seconds", {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _value(entry: Entry | None, form: str) -> Cell:
    if entry is None:
        return Cell(ABSENT)
    mean, std = entry.value.mean, entry.value.std
    text = f"{mean:{form}}" + (f" ± {std:{form}}" if std is not None else "")
    return Cell(text, entry.best, mark_text(entry.marks), str(entry.value.n))


def _beside(value: float | None, form: str) -> Cell:
    return Cell(ABSENT if value is None else format(value, form), kind="beside")


def _minus(entry: Entry | None, paper: float | None) -> float | None:
    return None if entry is None or paper is None else entry.value.mean - paper


def _pair(pair: Difference | None, form: str) -> list[Cell]:
    if pair is None:
        return [Cell(ABSENT), Cell(ABSENT, kind="beside")]
    alone, together = (interval_text(pair.mean, half, form) for half in (pair.half_width, pair.holm_half_width))
    first = f"{pair.mean:+{form}} {alone}{' *' if pair.clear else ''}".rstrip()
    second = f"{together}{' *' if pair.clear_of_all else ''}"
    return [Cell(first, count=str(pair.n)), Cell(second or ABSENT, kind="beside")]


def number_form(unit: str) -> str:
    """Return how a table's numbers are written: percentages with two decimals, others, of any size, with four digits.

    >>> format(3.14159e-7, number_form("")), format(95.0, number_form("%"))
    ('3.142e-07', '95.00')
    """
    return ".2f" if unit else ".4g"


def interval_text(middle: float, half: float | None, form: str = ".2f") -> str:
    """Return ``[low, high]`` about a middle; nothing without a width.

    >>> interval_text(1.0, 0.25)
    '[+0.75, +1.25]'
    """
    return "" if half is None else f"[{middle - half:+{form}}, {middle + half:+{form}}]"


def parts(grid: Grid, columns: int = 10) -> list[Grid]:
    """Return a grid in parts that have at most so many columns, but no group cut through: a page is no wider."""
    found: list[Grid] = []
    start = 1
    groups: list[tuple[str, list[str]]] = []
    for place, group in enumerate(grid.groups):
        groups.append(group)
        width = sum(len(names) for _, names in groups)
        following = grid.groups[place + 1 : place + 2]
        if following and width + len(following[0][1]) <= columns:
            continue
        rows = [[row[0], *row[start : start + width]] for row in grid.rows]
        last = place == len(grid.groups) - 1
        found.append(replace(grid, groups=groups, rows=rows, footnotes=grid.footnotes if last else []))
        start, groups = start + width, []
    return found


def grids(table: Table) -> list[Grid]:
    """Return all grids of a table."""
    return [main_grid(table), *([paired_grid(table)] if table.has_pairs else [])]


def markdown(table: Table, said: set[str] | None = None) -> str:
    """Return a table as Markdown.

    Args:
        table: the table.
        said: lines and captions that stand above already, and are not said again; added to.
    """
    said = set() if said is None else said
    lines = [f"- {markdown_text(line)}" for line in table.protocol if line not in said]
    for grid in grids(table):
        lines += markdown_grid(grid, grid.caption not in said)
        said.add(grid.caption)
    said.update(table.protocol)
    return "\n".join(lines).strip("\n") + "\n"


def markdown_grid(grid: Grid, captioned: bool = True) -> list[str]:
    """Return the lines of one grid as Markdown, an empty one first: caption, table, footnotes."""
    lines = ["", f"{markdown_text(grid.caption)}:", ""] if captioned else [""]
    head = [markdown_text(grid.corner)]
    for title, headings in grid.groups:
        first = f"{title}{headings[0].removeprefix('measured')}" if headings[0] != "difference" else title
        head += [markdown_text(first), *headings[1:]] if title else [markdown_text(name) for name in headings]
    lines += [_md_row(head), _md_row(["---", *["---:"] * (len(head) - 1)])]
    lines += [_md_row([_md_cell(cell) for cell in row]) for row in grid.rows]
    return lines + (["", *(f"{markdown_text(line)}\n" for line in grid.footnotes)] if grid.footnotes else [])


def _md_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md_cell(cell: Cell) -> str:
    text = markdown_text(cell.text) if cell.kind in ("label", "words") else cell.text
    return (f"**{text}**" if cell.bold else text) + cell.beside


def latex(table: Table, number: int = 1) -> str:
    """Return a table as LaTeX (package booktabs); the differences follow as a second one.

    Args:
        table: the table.
        number: of the table among several, for its label.
    """
    lines = [f"% {shown(line, 2000)}" for line in table.protocol]
    for grid in grids(table):
        lines += latex_grid(grid, number)
    return "\n".join(lines)


def latex_grid(grid: Grid, number: int = 1) -> list[str]:
    """Return the lines of one grid as LaTeX; `number` tells it from others of its name."""
    widths = [len(headings) for _, headings in grid.groups]
    counted = len({cell.count for row in grid.rows for cell in row if cell.count}) > 1
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{tex_text(grid.caption)}.}}"]
    lines += [rf"\label{{tab:{grid.label}-{number}}}", rf"\begin{{tabular}}{{l{'r' * sum(widths)}}}", r"\toprule"]
    if any(title for title, _ in grid.groups):
        titles = [rf"\multicolumn{{{len(names)}}}{{c}}{{{tex_text(title)}}}" for title, names in grid.groups]
        lines.append(_tex_row([tex_text(grid.corner), *titles]))
        ends = [1 + sum(widths[: place + 1]) for place in range(len(widths))]
        lines.append("".join(rf"\cmidrule(lr){{{end - w + 1}-{end}}}" for end, w in zip(ends, widths, strict=True)))
    corner = "" if any(title for title, _ in grid.groups) else tex_text(grid.corner)
    lines.append(_tex_row([corner, *(tex_text(name) for _, names in grid.groups for name in names)]))
    lines += [r"\midrule", *(_tex_row([_tex_cell(cell, counted) for cell in row]) for row in grid.rows)]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip {{\footnotesize {tex_text(line)}\par}}" for line in grid.footnotes]
    return [*lines, r"\end{table}", ""]


def _tex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _tex_cell(cell: Cell, counted: bool) -> str:
    """Return a cell with its marks, and its number of seeds where `counted`: else the caption has it."""
    if cell.kind == "label":  # the \\ of the row above would take a bracket or an asterisk for its argument
        return ("{}" if cell.text[:1] in ("[", "*") else "") + tex_text(cell.text)
    # of numbers with a true minus: a hyphen before a digit is none
    text = tex_text(cell.text if cell.kind == "words" else cell.text.replace("-", "\u2212"))
    raised = rf"\textsuperscript{{{tex_text(cell.marks.strip())}}}" if cell.marks else ""
    count = f" ({cell.count})" if counted and cell.count else ""
    return (rf"\textbf{{{text}}}" if cell.bold else text) + raised + count


def csv_text(tables: Sequence[Table]) -> str:
    """Return tables as one CSV text in long form: one row a method and column."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["table", "metric", "method", "title", "data", "noise", "missing_rate", "seeds", "mean", "std", "leads", "best",
         "remarks", "paper", "difference_to_paper", "worst_client", "worst_decile", "reference",
         "method_minus_reference", "ci95_low", "ci95_high", "holm_low", "holm_high", "p", "paired_seeds", "protocol"]
    )  # fmt: skip
    for number, table in enumerate(tables, 1):
        for (label, column), entry in table.entries.items():
            mean, pair = entry.value, entry.pair
            differences: list[float | None] = [None] * 6
            if pair is not None:
                differences = [pair.mean, *ends(pair, pair.half_width), *ends(pair, pair.holm_half_width), pair.p]
            met = "; ".join(table.remarks[place] for place in entry.marks)
            writer.writerow(
                [number, table.metric, label, table.title(label), *column, mean.n, repr(mean.mean), exact(mean.std),
                 int(entry.leads), int(entry.best), met, exact(entry.paper), exact(_minus(entry, entry.paper)),
                 *(exact(None if one is None else one.mean) for one in (entry.worst, entry.decile)),
                 "" if pair is None else table.reference, *map(exact, differences),
                 "" if pair is None else pair.n, "; ".join(table.protocol)]
            )  # fmt: skip
    return text.getvalue()


def ends(pair: Difference, half: float | None) -> tuple[float | None, float | None]:
    """Return the ends of a difference's interval, given half its width."""
    return (None, None) if half is None else (pair.mean - half, pair.mean + half)


def exact(value: float | None) -> str:
    """Return a number to its last digit, as files of values have it."""
    return "" if value is None else repr(value)


def all_markdown(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Return tables and the notes on runs as Markdown; what holds for several tables is said at the first."""
    said: set[str] = set()
    several = len(tables) > 1
    heads = [f"**Table {number}**\n\n" if several else "" for number in range(1, len(tables) + 1)]
    text = "\n".join(f"{head}{markdown(table, said)}" for head, table in zip(heads, tables, strict=True))
    return text + ("\n" + "\n".join(f"- {markdown_text(note)}" for note in notes) + "\n" if notes else "")


def all_latex(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Return tables as LaTeX, the notes as comments."""
    text = "\n".join(latex(table, number) for number, table in enumerate(tables, 1))
    return f"{PREAMBLE}\n{text}" + "".join(f"% {shown(note, 2000)}\n" for note in notes)

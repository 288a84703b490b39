"""What runs took, and what their aggregations reported, a row a method."""

from __future__ import annotations

from collections.abc import Sequence

from jgesr_lightning.reporting.render import ABSENT, Cell, Grid
from jgesr_lightning.reporting.runs import Block, Run
from jgesr_lightning.reporting.tables import Table, column_title

_SHOWN = (  # heading, metric of the last round, form
    ("iterations", "aggregator/iterations", ".0f"),
    ("converged", "aggregator/converged", ".0%"),
    ("residual of models", "aggregator/stationarity_models", ".1e"),
    ("residual of graph", "aggregator/stationarity_graph", ".1e"),
    ("objective", "aggregator/objective", ".4g"),
    ("edges", "aggregator/edges", ".0f"),
)


def diagnostics(block: Block, table: Table) -> Grid:
    """Return seconds and the last aggregation's diagnostics, means over seeds; columns without a value are left out."""
    rows = [[Cell(table.title(label), kind="label")] for label in table.rows]
    groups = []
    for column in table.columns:
        cells = {label: block.cell(label, column) for label in table.rows}
        shown = [
            (heading, {label: _mean([run.last(metric) for run in runs]) for label, runs in cells.items()}, form)
            for heading, metric, form in _SHOWN
        ]
        seconds = [
            (heading, {label: _mean([_seconds(run, part) for run in runs]) for label, runs in cells.items()}, ".3g")
            for heading, part in (("seconds", "total"), ("training", "train"), ("aggregation", "aggregate"))
        ]
        kept = [item for item in (*seconds, *shown) if any(value is not None for value in item[1].values())]
        if not kept:
            continue
        groups.append((column_title(column), [heading for heading, _, _ in kept]))
        for label, row in zip(table.rows, rows, strict=True):
            for _, values, form in kept:
                value = values[label]
                row.append(Cell(ABSENT if value is None else format(value, form)))
    caption = (
        "Seconds of a run, and the aggregation of the last round: means over seeds, converged as a share of them; "
        "residuals: by how much the optimality conditions of J fail, as a share of their terms"
    )
    if not any("residual" in heading for _, headings in groups for heading in headings):
        caption = caption.partition(";")[0]
    return Grid(caption, groups, rows, [], "diagnostics")


def _seconds(run: Run, part: str) -> float | None:
    value = run.summary.get("seconds", {}).get(part)
    return float(value) if isinstance(value, int | float) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""What a run says when it ends: its result, what to know about it, and the commands that lead on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jgesr_lightning.arguments import invocation
from jgesr_lightning.records import RoundRecord, best_of, last_measured, remarks

KINDS = ("received", "trained")


def closing_lines(
    records: Sequence[RoundRecord], folder: Path, rounds: int, finished: bool, metric: str = "accuracy/received"
) -> list[str]:
    """Return the last lines of a run.

    Args:
        records: one a round, round 0 included.
        folder: the run's folder.
        rounds: rounds that the run was to have.
        finished: whether it had them all.
        metric: the accuracy that leads: its kind of model comes first, and the best round is the best by it.
    """
    last, lines = last_measured(records), []
    if last is not None:
        kinds = sorted(KINDS, key=lambda kind: not metric.startswith(f"accuracy/{kind}"))
        lines += _accuracies(last, kinds)
        best = best_of(records, metric)
        if finished and best is not None:
            word = metric.removeprefix("accuracy/").replace("_", " ")
            value = f"{word} {100 * best.metrics[metric]:.2f} %"
            lines.append(f"  best for orientation, chosen on the test set: round {best.round}, {value}")
    lines += [f"note: {remark['text']}" for remark in remarks(records)]
    lines.append(f"results: {folder}")
    call, place = invocation(), shlex.quote(str(folder))
    if finished:
        lines.append(f"next: {call} report {place}   (or figures, table, export)")
        lines.append(f"more rounds: {call} train {place}/config.yaml resume=auto rounds={2 * rounds}")
    else:
        lines.append(f"go on: {call} train {place}/config.yaml resume=auto")
    return lines


def _accuracies(record: RoundRecord, kinds: Sequence[str]) -> list[str]:
    """Return the accuracies of a round, one line a kind of model."""
    clients = len(next(iter(record.clients.values()), []))
    lines = [f"accuracy after round {record.round}, mean over {clients} clients:"]
    for kind in kinds:
        names = [f"accuracy/{kind}{ending}" for ending in ("", "_weighted", "_worst")]
        if names[0] in record.metrics:
            plain, weighted, worst = (f"{100 * record.metrics[name]:.2f} %" for name in names)
            lines.append(f"  {kind:8}  {plain}   (by test samples {weighted}, worst client {worst})")
    return lines

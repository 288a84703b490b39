"""What a run remembers: each round in plain numbers, read alike by files, W&B and checkpoints, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from jgesr_lightning.summary import higher_is_better


@dataclass
class RoundRecord:
    """One round, as logged.

    Attributes:
        round: 0 is before any training.
        metrics: one number a name. ``accuracy/received*`` is measured on what clients receive after the round,
            ``accuracy/trained*`` on what clients hold after local training, before the uplink.
        clients: one list of K numbers a name.
        info: the aggregation's diagnostics.
    """

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, list[float]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class FederationState:
    """Where a run stands after a whole round: all that the next needs, besides the aggregator's own state.

    Attributes:
        round: rounds completed.
        models: (clients of this process, d) what the clients were sent last, or made of it; rows of psi.
        records: one a completed round, round 0 included.
        graphs: round -> (K, K) graph, for the rounds that were kept.
        layer_graphs: round -> (layers, K, K), where the method learns one graph a layer.
        own: (clients of this process, d) what the clients had trained last, where their training goes on from that.
        believed: (clients of this process, d) what the server takes `models` to be, where it cannot know them since
            clients put in models of their own, or lost some of what they were sent.
    """

    round: int
    models: Tensor
    records: list[RoundRecord] = field(default_factory=list)
    graphs: dict[int, Tensor] = field(default_factory=dict)
    layer_graphs: dict[int, Tensor] = field(default_factory=dict)
    own: Tensor | None = None
    believed: Tensor | None = None


def last_measured(records: Sequence[RoundRecord]) -> RoundRecord | None:
    """Return the last round, after training began, that was evaluated; None without any."""
    measured = (record for record in reversed(records) if record.round > 0 and "accuracy/received" in record.metrics)
    return next(measured, None)


def best_of(records: Sequence[RoundRecord], metric: str) -> RoundRecord | None:
    """Return the first round, after training began, with the best value of a metric; None without any."""
    measured = [record for record in records if record.round > 0 and metric in record.metrics]
    choose = max if higher_is_better(metric) else min
    return choose(measured, key=lambda record: record.metrics[metric], default=None)


def remarks(records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return what a reader of a run's results must know, one entry a kind: its rounds, and a line of text.

    Kinds: "nothing_shared" (after aggregation every client had its own model alone), "dropped_uploads" (uploads that
    were not finite were left out), "diverged" (the solver diverged: what was sent is worthless) and "changed_code" (the
    run went on with other code of somebody's own).
    """
    found = []
    alone = [r.round for r in records if r.info.get("shared") == "nothing"]
    if alone:
        text = f"nothing was shared in {_rounds(alone)}: each client was sent what had arrived from it alone"
        found.append({"kind": "nothing_shared", "rounds": alone, "text": text})
    broken = {r.round: list(r.info["dropped_clients"]) for r in records if r.info.get("dropped_clients")}
    if broken:
        empty = [r.round for r in records if r.round in broken and r.metrics.get("participants") == 0]
        clients = sorted({client for dropped in broken.values() for client in dropped})
        who = f"{'client' if len(clients) == 1 else 'clients'} {_listed(clients)}"
        text = f"uploads that were not finite were left out in {_rounds(list(broken))} ({who})"
        text += f"; none was usable in {_rounds(empty)}" if empty else ""
        found.append({"kind": "dropped_uploads", "rounds": list(broken), "text": text})
    diverged = [r.round for r in records if r.info.get("reason") == "diverged"]
    if diverged:
        text = (
            f"the solver diverged in {_rounds(diverged)}, what was sent then is worthless: "
            f"aggregator.step=backtracking helps"
        )
        found.append({"kind": "diverged", "rounds": diverged, "text": text})
    changed = {r.round: r.info["changed_code"] for r in records if r.info.get("changed_code")}
    if changed:
        files = ", ".join(sorted({file for several in changed.values() for file in several}))
        text = f"after {_rounds(list(changed))} it went on with other code: {files}"
        found.append({"kind": "changed_code", "rounds": list(changed), "text": text})
    return found


def _rounds(numbers: Sequence[int]) -> str:
    return f"{'round' if len(numbers) == 1 else 'rounds'} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words, runs of three or more as spans.

    >>> _listed([1, 2, 3, 5, 8, 9])
    '1 to 3, 5, 8, 9'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [[f"{s[0]} to {s[-1]}"] if len(s) > 2 else [str(number) for number in s] for s in spans]
    return ", ".join(part for several in parts for part in several)

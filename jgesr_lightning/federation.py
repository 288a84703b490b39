"""The round loop: send, train, upload, aggregate, evaluate, log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Aggregator
from jgesr_lightning.callbacks.orchestrator import RoundOrchestrator
from jgesr_lightning.channel import Uplink
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.records import RoundRecord, summarise
from jgesr_lightning.runtime.sharding import Sharding
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.seeding import PARTICIPATION, generator
from jgesr_lightning.training.base import Engine


class NonFiniteError(RuntimeError):
    """An upload or an aggregate holds NaN or infinity; the message names the round and the client."""


@dataclass
class FederationState:
    """All that the next round needs, besides the aggregator's own state.

    Attributes:
        round: rounds completed.
        models: (clients of this process, d) what the server sent last; rows of psi.
        records: one a completed round, round 0 included.
        graphs: round -> (K, K) graph, for the rounds that were kept.
        layer_graphs: round -> (layers, K, K), where the method learns one graph a layer.
    """

    round: int
    models: Tensor
    records: list[RoundRecord] = field(default_factory=list)
    graphs: dict[int, Tensor] = field(default_factory=dict)
    layer_graphs: dict[int, Tensor] = field(default_factory=dict)


class Stopwatch:
    """Seconds spent in each named part of a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed block; waits for the accelerator, so that its work counts where it was done."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Federation:
    """Runs rounds and fires the hooks of `fabric`'s callbacks.

    Hooks of the callbacks, in order; callbacks other than the orchestrator observe:

    - ``on_federation_start(federation, state)``
    - a round: ``on_round_start(round_number, sent)``
    - each client of this process: ``on_client_delivered(row, client, model)``, `model` (d,) being the engine's own
      memory; then, for callbacks that have it, ``on_client_trained(row, client, state_dict)``
    - ``on_round_end(federation, state, record, watch)``
    - ``on_federation_end(federation, state, status)``

    Args:
        fabric: launched Fabric whose callbacks include `orchestrator`, first.
        orchestrator: collects the trained models.
        engine: trains and evaluates the clients of this process.
        uplink: the channel.
        aggregator: the server's method.
        sharding: who holds which rows and columns.
        layout: order of the columns.
        initial: (d,) the model that everybody starts from.
        sizes: (K,) training samples of each client.
        test_sizes: (K,) test samples of each client.
        rounds: number of rounds.
        participation: share of the clients that take part in a round.
        evaluation_every: rounds between evaluations; round 0 and the last round are always evaluated.
        graph_every: rounds between kept graphs; the last round's is always kept.
        nonfinite: "drop" treats a client with a non-finite upload as absent in that round, "raise" stops.
        seed: seed of who takes part.
        stop: tells when to end early.
    """

    def __init__(
        self,
        fabric: Fabric,
        orchestrator: RoundOrchestrator,
        engine: Engine,
        uplink: Uplink,
        aggregator: Aggregator,
        sharding: Sharding,
        layout: ParameterLayout,
        initial: Tensor,
        sizes: Sequence[int],
        test_sizes: Sequence[int],
        rounds: int,
        participation: float = 1.0,
        evaluation_every: int = 1,
        graph_every: int = 1,
        nonfinite: str = "drop",
        seed: int = 0,
        stop: StopRequest | None = None,
    ) -> None:
        self.fabric = fabric
        self.orchestrator = orchestrator
        self.engine = engine
        self.uplink = uplink
        self.aggregator = aggregator
        self.sharding = sharding
        self.layout = layout
        self.initial = initial
        self.weights = torch.tensor(list(sizes), dtype=torch.float64)
        self.test_weights = torch.tensor(list(test_sizes), dtype=torch.float64)
        self.rounds = rounds
        self.participation = participation
        self.evaluation_every = evaluation_every
        self.graph_every = graph_every
        self.nonfinite = nonfinite
        self.seed = seed
        self.stop = stop if stop is not None else StopRequest()
        self._layers = sharding.layers(layout.layers)
        self._watch = Stopwatch(fabric.device)

    def fresh_state(self) -> FederationState:
        """Return the state before round 1: everybody has the initial model."""
        rows = len(self.sharding.clients)
        return FederationState(round=0, models=self.initial.expand(rows, -1).clone())

    def run(self, state: FederationState) -> str:
        """Run the rounds that `state` has not had yet, updating it in place.

        Returns:
            "finished", or "stopped" where a stop was requested: `state` is then that of the last whole round.

        Raises:
            NonFiniteError: an upload (with nonfinite="raise") or an aggregate was not finite.
        """
        self.fabric.call("on_federation_start", federation=self, state=state)
        # what the server sent last, by columns; kept beside the rows, so that no round moves it twice
        previous = self.sharding.to_columns(state.models)
        if not state.records:
            self._finish_round(state, RoundRecord(0), trained=None)
        status = "finished"
        while state.round < self.rounds:
            outcome = None if self._stopping() else self._round(state.round + 1, state.models, previous)
            if outcome is None:
                status = "stopped"
                break
            record, aggregate = outcome
            previous = aggregate.models
            state.models = self.sharding.to_rows(previous)
            state.round = record.round
            if record.round % self.graph_every == 0 or record.round == self.rounds:
                state.graphs[record.round] = aggregate.graph
                if aggregate.layer_graphs is not None:
                    state.layer_graphs[record.round] = aggregate.layer_graphs
            self._finish_round(state, record, self.orchestrator.trained)
        self.fabric.call("on_federation_end", federation=self, state=state, status=status)
        return status

    def participants(self, round_number: int) -> list[int]:
        """Return the clients that take part in a round, ascending; a function of the seed and the round alone."""
        count = max(1, round(self.participation * self.sharding.num_clients))
        order = torch.randperm(
            self.sharding.num_clients, generator=generator(self.seed, PARTICIPATION, round_number)
        ).tolist()
        return sorted(order[:count])

    def _stopping(self) -> bool:
        return self.sharding.any(bool(self.stop))

    def _round(self, number: int, sent: Tensor, previous: Tensor) -> tuple[RoundRecord, Aggregate] | None:
        """Run one round up to the aggregation; None where it was abandoned because of a stop request."""
        record = RoundRecord(number)
        clients = self.sharding.clients
        chosen = set(self.participants(number))
        rows = [row for row, client in enumerate(clients) if client in chosen]
        self.fabric.call("on_round_start", round_number=number, sent=sent)

        def deliver(row: int, model: Tensor) -> None:
            self.fabric.call("on_client_delivered", row=row, client=clients[row], model=model)
            if self.orchestrator.asked:
                state_dict = self.orchestrator.state_dict(row)
                self.fabric.call("on_client_trained", row=row, client=clients[row], state_dict=state_dict)

        with self._watch.part("train"):
            losses = self.engine.train(number, rows, sent, deliver, stopping=lambda: bool(self.stop))
        if self._stopping():
            return None
        with self._watch.part("uplink"):
            received, mask = self.uplink(self.orchestrator.trained, number, clients)
            finite = self.sharding.gather(torch.isfinite(received).all(1)).bool()
            present = self._present(number, chosen, finite, record)
            columns = self.sharding.to_columns(received)
            arrived = self.sharding.to_columns(mask) if self.uplink.missing_rate > 0 else None
        with self._watch.part("aggregate"):
            aggregate = self.aggregator(
                columns,
                self.weights,
                mask=arrived,
                previous=previous,
                initial=self.initial[self.sharding.columns],
                present=present,
                layers=self._layers,
                reduce=self.sharding.sum,
            )
        if self.sharding.any(not bool(torch.isfinite(aggregate.models).all())):
            raise NonFiniteError(
                f"round {number}: the aggregate of {self.aggregator.name} is not finite; "
                f"the models of round {number - 1} are kept"
            )
        record.info |= aggregate.info
        losses = self.sharding.gather(losses)
        record.clients["loss/train"] = losses.tolist()
        record.metrics["loss/train"] = float(losses.nanmean())
        return record, aggregate

    def _present(self, number: int, chosen: set[int], finite: Tensor, record: RoundRecord) -> Tensor:
        present = torch.tensor([k in chosen for k in range(self.sharding.num_clients)])
        broken = (present & ~finite).nonzero().squeeze(1).tolist()
        if broken and self.nonfinite == "raise":
            names = ", ".join(str(k) for k in broken)
            raise NonFiniteError(f"round {number}: the upload of client {names} is not finite (nonfinite=raise)")
        record.metrics["participants"] = float((present & finite).sum())
        record.metrics["dropped"] = float(len(broken))
        record.clients["participated"] = (present & finite).to(torch.float64).tolist()
        record.info["dropped_clients"] = broken
        return present & finite

    def _finish_round(self, state: FederationState, record: RoundRecord, trained: Tensor | None) -> None:
        """Evaluate, log and let the callbacks save."""
        due = record.round % self.evaluation_every == 0 or record.round == self.rounds
        if due:
            with self._watch.part("evaluate"):
                self._evaluate("received", state.models, record)
                if trained is not None:
                    self._evaluate("trained", trained, record)
        for name, value in _scalars(record.info).items():
            record.metrics[f"aggregator/{name}"] = value
        for name in ("train", "uplink", "aggregate", "evaluate", "log", "checkpoint"):
            # logging and saving happen after this record is written: theirs are those of the round before
            record.metrics[f"seconds/{name}"] = self._watch.seconds.pop(name, 0.0)
        state.records.append(record)
        self.fabric.call("on_round_end", federation=self, state=state, record=record, watch=self._watch)

    def _evaluate(self, what: str, models: Tensor, record: RoundRecord) -> None:
        accuracy, loss = (self.sharding.gather(values) for values in self.engine.evaluate(models))
        record.clients[f"accuracy/{what}"] = accuracy.tolist()
        record.clients[f"loss/{what}"] = loss.tolist()
        record.metrics |= summarise(f"accuracy/{what}", accuracy, self.test_weights)
        record.metrics[f"loss/{what}"] = float(loss.mean())


def _scalars(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among an aggregation's diagnostics, and the last value of its objective."""
    numbers = {name: float(value) for name, value in info.items() if isinstance(value, (bool, int, float))}
    trace = info.get("objective")
    if isinstance(trace, list) and trace:
        numbers["objective"] = float(trace[-1])
    return numbers

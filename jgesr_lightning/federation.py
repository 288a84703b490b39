"""The round loop: send, train, upload, aggregate, evaluate, log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate
from jgesr_lightning.measures import LEAST, edge_scores, likeness, summarise
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.runtime.method_state import Unsaved, copied
from jgesr_lightning.seeding import AGGREGATION, derive, drawing_from
from jgesr_lightning.timing import Stopwatch


class NonFiniteError(RuntimeError):
    """An upload or an aggregate holds NaN or infinity; the message names the round and the client."""


class Federation:
    """Runs rounds and fires the hooks of Fabric's callbacks.

    Hooks of the callbacks, in order; callbacks other than the orchestrator observe:

    - ``on_federation_start(plan, state)``
    - a round: ``on_round_start(round_number, sent)``
    - each client of this process: ``on_client_delivered(row, client, model)``, `model` (d,) being the engine's own
      memory; then, for callbacks that have it, ``on_client_trained(row, client, state_dict)``
    - ``on_round_end(plan, state, record, watch)``
    - ``on_federation_end(plan, state, status)``

    Args:
        plan: what the rounds are made of.
    """

    def __init__(self, plan: RoundPlan) -> None:
        self.plan = plan
        self._layers = plan.sharding.layers(plan.layout.layers)
        own_variances = plan.layout.variances[plan.sharding.columns]
        self._variances = own_variances.nonzero().squeeze(1).to(plan.fabric.device)
        self._watch = Stopwatch(plan.fabric.device)
        self._unsaved = Unsaved(plan.aggregator) if plan.fabric.is_global_zero else None

    def fresh_state(self) -> FederationState:
        """Return the state before round 1: everybody has the initial model."""
        rows = len(self.plan.sharding.clients)
        return FederationState(round=0, models=self.plan.initial.expand(rows, -1).clone())

    def run(self, state: FederationState) -> str:
        """Run the rounds that `state` has not had yet, updating it in place.

        Returns:
            "finished", or "stopped" where a stop was requested: `state` is then that of the last whole round.

        Raises:
            NonFiniteError: an aggregate was not finite, or an upload (with nonfinite="raise"), or nothing usable
                arrived in a round (but for "drop_all").
        """
        plan = self.plan
        plan.fabric.call("on_federation_start", plan=plan, state=state)
        if plan.aggregator.start != "own":  # a checkpoint may hold them for other ends
            state.own = None
        if plan.aggregator.own != "clean" and plan.downlink.is_perfect:
            state.believed = None
        # what the server sent last, by columns; kept beside the rows, so that no round moves it twice
        previous = plan.sharding.to_columns(state.models if state.believed is None else state.believed)
        if not state.records:
            self._finish_round(state, RoundRecord(0), trained=None)
        status = "finished"
        while state.round < plan.rounds:
            outcome = None if self._stopping() else self._round(state, previous)
            if outcome is None:
                status = "stopped"
                break
            record, aggregate = outcome
            previous = aggregate.models
            state.models = self._made_of(aggregate, state, record)
            state.round = record.round
            if plan.aggregator.start == "own":
                state.own = plan.collector.trained.clone()
            if plan.is_due(record.round, plan.graph_every):
                state.graphs[record.round] = aggregate.graph
                if aggregate.layer_graphs is not None:
                    state.layer_graphs[record.round] = aggregate.layer_graphs
            self._finish_round(state, record, plan.collector.trained)
        plan.fabric.call("on_federation_end", plan=plan, state=state, status=status)
        return status

    def _made_of(self, aggregate: Aggregate, state: FederationState, record: RoundRecord) -> Tensor:
        """Return what this process's clients make of what they are sent; note what the server takes that to be."""
        plan, own = self.plan, aggregate.own
        sent = plan.sharding.to_rows(aggregate.models)
        if own is not None or not plan.downlink.is_perfect:
            state.believed = sent
        if own is None:
            return self._delivered(sent, state, record)
        rest, trained = self._delivered(plan.sharding.to_rows(own.rest), state, record), plan.collector.trained
        weights = own.weights[:, plan.sharding.clients].T.to(rest)
        if weights.shape[1] > 1:
            weights = weights.repeat_interleave(torch.tensor(plan.layout.layers, device=rest.device), 1)
        return torch.where(weights.isnan(), state.models, weights * trained + (1 - weights) * rest)

    def _delivered(self, sent: Tensor, state: FederationState, record: RoundRecord) -> Tensor:
        """Return what reaches this process's clients; who took no part is sent nothing, what is lost stays as it is."""
        plan, clients, trained = self.plan, self.plan.sharding.clients, self.plan.collector.trained
        if plan.downlink.is_perfect:
            return sent
        held = torch.where(torch.isfinite(trained), trained, state.models)
        received = plan.downlink(sent, held, record.round, clients)
        received = torch.where(plan.layout.variances.to(received.device), received.clamp(min=0), received)
        took_part = torch.tensor(record.clients["participated"], device=received.device)[clients, None].bool()
        return torch.where(took_part, received, state.models)

    def _stopping(self) -> bool:
        return self.plan.sharding.any(bool(self.plan.stop))

    def _round(self, state: FederationState, previous: Tensor) -> tuple[RoundRecord, Aggregate] | None:
        """Run the next round up to the aggregation; None where it was abandoned because of a stop request."""
        plan, sharding, number = self.plan, self.plan.sharding, state.round + 1
        record = RoundRecord(number)
        chosen = plan.participants(number)
        start, anchors = self._ends(state)
        rows = [row for row, client in enumerate(sharding.clients) if client in chosen]
        losses = self._train(number, rows, start, anchors)
        if self._stopping():
            return None
        columns, mask, present = self._receive(state, chosen, rows, start, record)
        aggregate = self._aggregate(columns, mask, present, previous, record)
        record.info |= aggregate.info
        if plan.groups:
            record.metrics |= edge_scores(aggregate.graph, plan.groups)
        if plan.aggregator.shares and not _connected(aggregate.graph):
            record.info["shared"] = "nothing"
        losses = sharding.gather(losses)
        record.clients["loss/train"] = losses.tolist()
        record.metrics["loss/train"] = float(losses.nanmean())
        return record, aggregate

    def _receive(
        self, state: FederationState, chosen: Sequence[int], rows: Sequence[int], start: Tensor, record: RoundRecord
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what arrives, by columns, its mask, None where all did, and whose upload counts, (K,) bool."""
        plan, sharding = self.plan, self.plan.sharding
        with self._watch.part("uplink"):
            updates = (plan.collector.trained[row] - start[row] for row in rows)
            record.metrics |= likeness(updates, start.shape[1], start.device, sharding.sum)
            received, mask = self._uplink(state, rows)
            finite = torch.isfinite(received).all(1)
            if plan.aggregator.own == "clean":  # what the client puts in has to be, too, also where it was lost
                finite &= torch.isfinite(plan.collector.trained).all(1)
            lossy = sharding.any(not bool(mask.all()))
            finite = sharding.gather(finite).bool()
            came = sharding.gather(mask.any(1)).bool() if lossy else torch.ones_like(finite)
            present = self._present(chosen, finite, came, record)
            return sharding.to_columns(received), sharding.to_columns(mask) if lossy else None, present

    def _aggregate(
        self, columns: Tensor, mask: Tensor | None, present: Tensor, previous: Tensor, record: RoundRecord
    ) -> Aggregate:
        """Aggregate what arrived, and leave the method as it was where the result is of no use."""
        plan, sharding = self.plan, self.plan.sharding
        former = copied(plan.aggregator.state())  # what it gives away may be what it changes
        # a method may draw: alike on all processes, and on the other side of an interruption
        seed = derive(plan.seed, AGGREGATION, record.round)
        with self._watch.part("aggregate"), drawing_from(seed, columns.device):
            aggregate: Aggregate = plan.aggregator(
                columns,
                plan.weights,
                mask=mask,
                previous=previous,
                initial=plan.initial[sharding.columns],
                present=present,
                layers=self._layers,
                reduce=sharding.sum,
                noise_std=plan.uplink.known_noise(len(plan.weights)),
            )
        try:
            self._refuse_unusable(aggregate, record)
        except NonFiniteError:
            plan.aggregator.load_state(former)  # a checkpoint that is written now is one of the round before
            raise
        if self._unsaved is not None:
            self._unsaved.look()
        if len(self._variances):  # the noise can have made a running variance negative
            for models in (aggregate.models, *([] if aggregate.own is None else [aggregate.own.rest])):
                models[:, self._variances] = models[:, self._variances].clamp_(min=0)
        return aggregate

    def _uplink(self, state: FederationState, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return what arrives of what these of this process's clients trained, and which entries did."""
        plan, number, clients = self.plan, state.round + 1, self.plan.sharding.clients
        trained, sent = plan.collector.trained, state.models if state.believed is None else state.believed
        if len(rows) == len(clients):
            return plan.uplink(trained, number, clients, sent)
        received, mask = trained.clone(), torch.ones_like(trained, dtype=torch.bool)  # others are not asked for theirs
        if rows:
            received[rows], mask[rows] = plan.uplink(trained[rows], number, [clients[row] for row in rows], sent[rows])
        return received, mask

    @staticmethod
    def _ends(state: FederationState) -> tuple[Tensor, Tensor | None]:
        """Return what this process's clients train from, and what their penalties pull to where it is another."""
        if state.own is None:
            return state.models, None
        whole = torch.isfinite(state.own).all(1, keepdim=True)  # who broke takes what the server has
        return torch.where(whole, state.own, state.models), state.models

    def _train(self, number: int, rows: Sequence[int], start: Tensor, anchors: Tensor | None) -> Tensor:
        """Let these of this process's clients train from `start`; returns their losses."""
        plan = self.plan
        clients = plan.sharding.clients
        plan.fabric.call("on_round_start", round_number=number, sent=start)

        def deliver(row: int, model: Tensor) -> None:
            plan.fabric.call("on_client_delivered", row=row, client=clients[row], model=model)
            if plan.collector.asked:
                state_dict = plan.collector.state_dict(row)
                plan.fabric.call("on_client_trained", row=row, client=clients[row], state_dict=state_dict)

        with self._watch.part("train"):
            return plan.engine.train(number, rows, start, deliver, lambda: bool(plan.stop), anchors)

    def _present(self, chosen: Sequence[int], finite: Tensor, came: Tensor, record: RoundRecord) -> Tensor:
        """Return whose upload counts, (K,) bool, and note who was left out; of some nothing came."""
        asked = torch.zeros(len(finite), dtype=torch.bool)
        asked[list(chosen)] = True
        present = asked & finite & came
        broken = (asked & ~finite).nonzero().squeeze(1).tolist()
        if broken and self.plan.nonfinite == "raise":
            names = ", ".join(str(k) for k in broken)
            raise NonFiniteError(f"round {record.round}: the upload of client {names} is not finite (nonfinite=raise)")
        record.metrics |= {"participants": float(present.sum()), "dropped": float(len(broken))}
        record.clients["participated"] = present.to(torch.float64).tolist()
        record.info["dropped_clients"] = broken
        return present

    def _refuse_unusable(self, aggregate: Aggregate, record: RoundRecord) -> None:
        """Raise NonFiniteError for a round in which nothing usable arrived, and for an aggregate that is not finite."""
        plan, number = self.plan, record.round
        if plan.nonfinite != "drop_all" and aggregate.info.get("participants") == 0:
            why = (
                "every upload held NaN or infinity; a smaller local.lr or channel.noise, or another link, may help"
                if record.info["dropped_clients"]
                else "no entry of any model arrived; a smaller channel.missing_rate, or another link, may help"
            )
            raise NonFiniteError(f"round {number}: nothing usable arrived: {why} (nonfinite=drop_all goes on even so)")
        parts = (("aggregate", aggregate.models), ("graph", aggregate.graph))
        broken = [what for what, part in parts if plan.sharding.any(not bool(torch.isfinite(part).all()))]
        if broken:
            raise NonFiniteError(
                f"round {number}: the {broken[0]} of {plan.aggregator.name} is not finite; "
                f"the models of round {number - 1} are kept"
            )

    def _finish_round(self, state: FederationState, record: RoundRecord, trained: Tensor | None) -> None:
        """Evaluate, log and let the callbacks save."""
        plan = self.plan
        if plan.is_due(record.round, plan.evaluation_every):
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
        plan.fabric.call("on_round_end", plan=plan, state=state, record=record, watch=self._watch)

    def _evaluate(self, what: str, models: Tensor, record: RoundRecord) -> None:
        plan = self.plan
        accuracy, loss = (plan.sharding.gather(values) for values in plan.engine.evaluate(models))
        record.clients[f"accuracy/{what}"] = accuracy.tolist()
        record.clients[f"loss/{what}"] = loss.tolist()
        record.metrics |= summarise(f"accuracy/{what}", accuracy, plan.test_weights)
        record.metrics[f"loss/{what}"] = float(loss.mean())


def _connected(graph: Tensor) -> bool:
    """Whether any client gets more than a millionth of anything from another one."""
    return bool((graph - graph.diag().diag()).abs().max() > LEAST)


def _scalars(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among an aggregation's diagnostics, and the last value of its objective."""
    numbers = {name: float(value) for name, value in info.items() if isinstance(value, (bool, int, float))}
    trace = info.get("objective")
    if isinstance(trace, list) and trace:
        numbers["objective"] = float(trace[-1])
    return numbers

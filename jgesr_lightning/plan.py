"""What all rounds of a run are made of: the parts, who takes part, and how often what is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregator
from jgesr_lightning.channel import Downlink, Uplink
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.orchestrator import RoundOrchestrator
from jgesr_lightning.runtime.sharding import Sharding
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.seeding import PARTICIPATION, generator
from jgesr_lightning.training.base import Engine


@dataclass(frozen=True)
class RoundPlan:
    """The one description that the round loop works from and every callback is told of.

    Attributes:
        fabric: launched Fabric whose callbacks include `collector`, first.
        collector: gathers the trained models.
        engine: trains and evaluates the clients of this process.
        uplink: the channel.
        aggregator: the server's method.
        sharding: who holds which rows and columns.
        layout: order of the columns.
        initial: (d,) the model that everybody starts from.
        weights: (K,) float64: training samples of each client.
        test_weights: (K,) float64: test samples of each client.
        rounds: number of rounds.
        participation: share of the clients that take part in a round.
        evaluation_every: rounds between evaluations; round 0 and the last round are always evaluated.
        graph_every: rounds between kept graphs; the last round's is always kept.
        nonfinite: "drop" treats a client with a non-finite upload as absent in that round, and stops where a round has
            no upload left; "drop_all" goes on even then; "raise" stops at the first one.
        seed: seed of who takes part, and of what the method draws.
        stop: tells when to end early.
        groups: planted group of each client, which graphs are scored against; empty where there are none.
        downlink: what brings the clients what the server sends.
    """

    fabric: Fabric
    collector: RoundOrchestrator
    engine: Engine
    uplink: Uplink
    aggregator: Aggregator
    sharding: Sharding
    layout: ParameterLayout
    initial: Tensor
    weights: Tensor
    test_weights: Tensor
    rounds: int
    participation: float = 1.0
    evaluation_every: int = 1
    graph_every: int = 1
    nonfinite: str = "drop"
    seed: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    groups: Sequence[int] = ()
    downlink: Downlink = field(default_factory=Downlink)

    def participants(self, round_number: int) -> list[int]:
        """Return the clients that take part in a round, ascending; a function of the seed and the round alone."""
        clients = self.sharding.num_clients
        order = torch.randperm(clients, generator=generator(self.seed, PARTICIPATION, round_number)).tolist()
        return sorted(order[: max(1, round(self.participation * clients))])

    def is_due(self, round_number: int, every: int) -> bool:
        """Whether what happens `every` so many rounds happens after this one; the last round always counts."""
        return round_number % every == 0 or round_number == self.rounds

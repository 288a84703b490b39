"""What a federation has reached: all that the next round needs, besides the aggregator's own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from jgesr_lightning.records import RoundRecord


@dataclass
class FederationState:
    """Where a run stands after a whole round.

    Attributes:
        round: rounds completed.
        models: (clients of this process, d) what the clients were sent last, or made of it; rows of psi.
        records: one a completed round, round 0 included.
        graphs: round -> (K, K) graph, for the rounds that were kept.
        layer_graphs: round -> (layers, K, K), where the method learns one graph a layer.
        own: (clients of this process, d) what the clients had trained last, where their training goes on from that.
        believed: (clients of this process, d) what the server takes `models` to be, where it cannot know them since
            clients put in models of their own.
    """

    round: int
    models: Tensor
    records: list[RoundRecord] = field(default_factory=list)
    graphs: dict[int, Tensor] = field(default_factory=dict)
    layer_graphs: dict[int, Tensor] = field(default_factory=dict)
    own: Tensor | None = None
    believed: Tensor | None = None

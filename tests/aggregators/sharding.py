"""Run one aggregation as several processes would, each with some of the columns, in threads of this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from jgesr_lightning.aggregators import Aggregate, Aggregator
from jgesr_lightning.aggregators.base import Own


class SharedSum:
    """Sums what every rank hands in; a rank that calls more often than the others fails after `timeout` seconds."""

    def __init__(self, ranks: int, timeout: float = 20.0) -> None:
        self.barrier = threading.Barrier(ranks, timeout=timeout)
        self.slots: list[Tensor] = [torch.zeros(0)] * ranks

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(partial: Tensor) -> Tensor:
            self.slots[rank] = partial.clone()
            self.barrier.wait()
            shapes = {(tuple(slot.shape), slot.dtype) for slot in self.slots}
            assert len(shapes) == 1, f"the ranks sum different things: {shapes}"
            total = torch.stack(self.slots).sum(0)
            self.barrier.wait()
            return total

        return reduce


def split_layers(layers: Sequence[int], bounds: Sequence[int]) -> list[list[int]]:
    """Return each shard's number of columns of each layer, zero where it holds none of it."""
    starts = [sum(layers[:i]) for i in range(len(layers))]
    return [
        [max(0, min(stop, start + size) - max(begin, start)) for start, size in zip(starts, layers, strict=True)]
        for begin, stop in itertools.pairwise(bounds)
    ]


def run_sharded(
    factory: Callable[[], Aggregator],
    received: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    previous: Tensor | None = None,
    initial: Tensor | None = None,
    present: Tensor | None = None,
    layers: Sequence[int] | None = None,
    noise_std: Tensor | None = None,
    bounds: Sequence[int] | None = None,
) -> Aggregate:
    """Return what ranks that share out the columns compute together, each with an aggregator from `factory`.

    Args:
        factory: called once a rank, in the order of ranks.
        received, weights, mask, previous, initial, present, layers, noise_std: as for an aggregator, all columns.
        bounds: where the shards begin and end; default: two unequal shards.

    The graphs of all ranks must agree to the last digit, since decisions rest on reduced numbers.
    """
    size = received.shape[1]
    bounds = bounds or (0, max(1, size // 3), size)
    ranks = len(bounds) - 1
    shared = SharedSum(ranks)
    aggregators = [factory() for _ in range(ranks)]
    layer_parts = [None] * ranks if layers is None else split_layers(layers, bounds)

    def run(rank: int) -> Aggregate:
        columns = slice(bounds[rank], bounds[rank + 1])
        try:
            return aggregators[rank](
                received[:, columns],
                weights,
                mask=None if mask is None else mask[:, columns],
                previous=None if previous is None else previous[:, columns],
                initial=None if initial is None else initial[columns],
                present=present,
                layers=layer_parts[rank],
                reduce=shared.of(rank),
                noise_std=noise_std,
            )
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        outs = [future.result() for future in [pool.submit(run, rank) for rank in range(ranks)]]
    for out in outs[1:]:
        torch.testing.assert_close(out.graph, outs[0].graph, rtol=0, atol=0)
    own = outs[0].own
    if own is not None:
        assert all(torch.equal(out.own.weights.nan_to_num(-1), own.weights.nan_to_num(-1)) for out in outs)
        own = Own(own.weights, torch.cat([out.own.rest for out in outs], 1))
    models = torch.cat([out.models for out in outs], 1)
    return Aggregate(models, outs[0].graph, outs[0].info, outs[0].layer_graphs, own)

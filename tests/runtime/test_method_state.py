"""A method's state as a checkpoint has it: all columns, from any number of processes, and what these have alike."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jgesr_lightning.aggregators.base import Aggregator
from jgesr_lightning.runtime.method_state import StateError, gathered, restore
from jgesr_lightning.runtime.sharding import Sharding
from tests.aggregators.sharding import SharedSum

COLUMNS = 11


class Keeper(Aggregator):
    column_state = ("a", "b", "absent")

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def aggregate(self, upload):
        raise NotImplementedError

    def state(self):
        return self.kept

    def load_state(self, state):
        self.kept = state


def on_all(world, work):
    """Return what `work` makes of each process's sharding, whose sums are those of threads."""
    shared = SharedSum(world)

    def one(rank):
        sharding = Sharding([[k] for k in range(world)], COLUMNS, rank, torch.device("cpu"))
        if world > 1:
            sharding.sum = shared.of(rank)
        try:
            return work(sharding)
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(world)]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_columns_are_joined_and_shared_out_again(world, dtype):
    whole = {"a": (torch.randn(COLUMNS) * 3).to(dtype), "b": torch.randn(2, 4, COLUMNS), "absent": None}
    rest = {"rounds": 3, "names": ["x", {"y": (1.5, None)}], "graph": torch.randn(4, 4), "odd": torch.tensor(1j)}

    def work(sharding):
        mine = {key: None if value is None else value[..., sharding.columns] for key, value in whole.items()}
        kept = gathered(Keeper(mine | rest), sharding)
        other = Keeper({})
        restore(other, kept, sharding)
        return kept, other.kept, mine

    for kept, given, mine in on_all(world, work):
        assert torch.equal(kept["a"], whole["a"]) and kept["a"].dtype == dtype
        assert torch.equal(kept["b"], whole["b"]) and kept["absent"] is None
        assert all(kept[key] is rest[key] for key in rest)
        assert torch.equal(given["a"], mine["a"]) and torch.equal(given["b"], mine["b"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda rank: {"c": torch.ones(4) * rank}, r"^state\(\)\['c'\] differs between processes"),
        (lambda rank: {"ok": 1, "c": ["x" * rank]}, r"^state\(\)\['c'\] differs"),
        (lambda rank: {"c": {"d": torch.ones(5 + rank)}}, r"^state\(\)\['c'\] differs"),
        (lambda rank: {f"c{rank}": 1}, "other entries on another process"),
        (
            lambda rank: {"a": torch.ones(3)},
            r"^state\(\)\['a'\] is of shape \(3,\); by column_state its last dimension",
        ),
        (lambda rank: {"a": 1.5}, r"^state\(\)\['a'\] is a float; by column_state"),
    ],
)
def test_what_cannot_be_kept_for_all_is_named(state, message):
    def work(sharding):
        with pytest.raises(StateError, match=message):
            gathered(Keeper(state(sharding.rank)), sharding)

    on_all(2, work)


def test_rounding_does_not_make_processes_differ():
    on_all(2, lambda sharding: gathered(Keeper({"graph": torch.ones(3) * (1 + 1e-12 * sharding.rank)}), sharding))

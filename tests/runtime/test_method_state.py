"""A method's state as a checkpoint has it: all columns, from any number of processes, and what these have alike."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from jgesr_lightning.aggregators.fedavg import FedAvg
from jgesr_lightning.runtime.method_state import StateError, Unsaved, gathered, restore
from jgesr_lightning.runtime.sharding import Sharding
from tests.aggregators.sharding import SharedSum

COLUMNS = 11


class Keeper(FedAvg):
    column_state = ("a", "b", "absent")

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

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


class Forgetful(FedAvg):
    """Has no state; a round is what `act` does to it."""

    def __init__(self):
        super().__init__()
        self.count, self.words, self.pair = 0, "a", (1.5, None)
        self.tensor, self.absent = torch.zeros(3), None
        self.past, self.table, self.array = [torch.zeros(2)], {"deep": [{"x": 1}]}, np.zeros(4)
        self.draw, self.other_draw = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.chosen, self.lock = (lambda x: x), threading.Lock()
        self.register_buffer("mean", torch.zeros(3))
        self.net = nn.Linear(2, 1)

    @functools.cached_property
    def made_once(self):
        return 2.5


class Remembering(Forgetful):
    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


def count_on(method):
    method.count += 1


def told(caplog, method, act):
    unsaved = Unsaved(method)
    for _ in range(3):
        with torch.no_grad():
            act(method)
        unsaved.look()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("count", count_on),
        ("pair", lambda method: setattr(method, "pair", (2.5, None))),
        ("new", lambda method: setattr(method, "new", 1)),
        ("absent", lambda method: setattr(method, "absent", torch.ones(3))),
        ("words", lambda method: delattr(method, "words") if hasattr(method, "words") else None),
        ("tensor", lambda method: setattr(method, "tensor", method.tensor + 1)),
        ("tensor", lambda method: method.tensor.add_(1)),
        ("past", lambda method: method.past.append(torch.ones(2))),
        ("past", lambda method: method.past[0].add_(1)),
        ("table", lambda method: method.table["deep"][0].update(x=2)),
        ("array", lambda method: method.array.__iadd__(1)),
        ("draw", lambda method: torch.rand(1, generator=method.draw)),
        ("other_draw", lambda method: method.other_draw.random()),
        ("chosen", lambda method: setattr(method, "chosen", lambda x: 2 * x)),
        ("mean", lambda method: method.mean.mul_(2)),
        ("net", lambda method: method.net.bias.add_(1)),
    ],
)
def test_a_method_that_remembers_without_a_state_is_named_once(caplog, name, act):
    (line,) = told(caplog, Forgetful(), act)
    assert line.startswith(f"Forgetful changes self.{name} from round to round but has no state(): if results depend")


@pytest.mark.parametrize(
    ("method", "act"),
    [
        (Forgetful(), lambda method: None),
        (Forgetful(), lambda method: setattr(method, "warned", True)),
        (Forgetful(), lambda method: setattr(method, "pair", (0.5 + method.count + 1, None))),  # equal
        (Forgetful(), lambda method: method.made_once),
        (Forgetful(), lambda method: method.tensor.sum() + method.net(torch.ones(2)) + method.array.sum()),
        (Remembering(), count_on),
    ],
)
def test_a_method_that_remembers_nothing_or_gives_it_away_is_silent(caplog, method, act):
    assert told(caplog, method, act) == []

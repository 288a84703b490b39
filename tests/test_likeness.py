"""Length and likeness of updates: against every pair by itself, split over processes, and in a run."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jgesr_lightning.measures import likeness
from tests.federations import small_federation


def alone(part):
    return part


def of(updates, size, reduce=alone):
    return likeness(updates, size, torch.device("cpu"), reduce)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 10_000))
def test_pair_by_pair(clients, size, seed):
    updates = torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))
    pairs = itertools.combinations(updates.double(), 2)
    cosines = [float(torch.nn.functional.cosine_similarity(a, b, dim=0)) for a, b in pairs]
    found = of(updates, size)
    assert found["updates/cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-12)
    assert found["updates/length"] == pytest.approx(float(updates.double().norm(dim=1).square().mean().sqrt()))


def test_those_who_did_not_move_and_those_who_broke_do_not_count():
    updates = torch.tensor([[2.0, 0.0], [0.0, 0.0], [torch.nan, 1.0], [torch.inf, 0.0], [-2.0, 0.0]])
    assert of(updates, 2) == {"updates/length": 2.0, "updates/cosine": -1.0}
    one = of(updates[:2], 2)
    assert one["updates/length"] == 2.0 and math.isnan(one["updates/cosine"])
    assert all(math.isnan(value) for value in of([], 2).values())


def test_clients_of_several_processes_are_summed():
    updates = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    sums = []
    of(updates[:2], 7, lambda part: sums.append(part) or part)
    found = of(updates[2:], 7, lambda part: part + sums[0])
    assert found == pytest.approx(of(updates, 7), abs=1e-14)


class Watch:
    """Keeps what training began from in the last round, and what came out of it."""

    def on_round_start(self, round_number, sent):
        self.start, self.trained = sent.clone(), {}

    def on_client_delivered(self, row, client, model):
        self.trained[row] = model.clone()


@pytest.mark.parametrize("method", ["fedavg", "local", "fedamp"])
def test_of_a_round_it_is_what_was_trained_less_what_that_began_from(method):
    watch = Watch()
    federation = small_federation([watch], method=method, rounds=3, noise=0.5)
    state = federation.fresh_state()
    federation.run(state)
    trained = torch.stack([watch.trained[row] for row in range(4)])
    found = of(trained - watch.start, trained.shape[1])
    assert {name: state.records[3].metrics[name] for name in found} == found
    assert found["updates/length"] > 0
    assert "updates/length" not in state.records[0].metrics

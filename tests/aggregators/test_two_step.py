"""The two-step aggregation: graph learning and graph filtering in turn."""

import itertools
import math

import pytest
import torch

from jgesr_lightning.aggregators.two_step import TwoStep
from jgesr_lightning.graph import filter_signals, learn_graph, pairwise_sq_distances
from tests.aggregators.sharding import run_sharded
from tests.aggregators.test_jgesr import CLIENTS, LAYERS, some_round, valid


def test_its_result_reproduces_itself():
    received, weights = some_round()
    zeta = weights / weights.sum()
    out = valid(TwoStep(eps=1e-9)(received, weights))
    assert out.info["converged"]
    W = learn_graph(pairwise_sq_distances(out.models), 0.05, 1.0, 1.0)
    torch.testing.assert_close(out.graph, W, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(filter_signals(received, W, zeta, 0.05, 1.0), out.models, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fidelity", ["shares", "scaled", "uniform"])
def test_objective_falls_and_is_reported(masked, fidelity):
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(3)) > 0.2 if masked else None
    out = valid(TwoStep(fidelity=fidelity)(received, weights, mask=mask))
    trace = out.info["objective"]
    assert len(trace) == out.info["iterations"] + 1
    assert all(b <= a + 1e-10 * max(1, abs(a)) for a, b in itertools.pairwise(trace))
    assert not out.info["objective_rose"]
    assert out.info["edges"] == int((out.graph > 0).sum()) // 2
    for entry in out.info.values():
        assert type(entry) in (int, float, bool, str, list)


def test_gaps_neither_matter_nor_stay():
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[:, 7] = False
    previous = received.flip(1)
    previous[:, 7] = 5.0
    clean = TwoStep()(torch.where(mask, received, 0), weights, mask=mask, previous=previous)
    noisy = valid(TwoStep()(torch.where(mask, received, math.nan), weights, mask=mask, previous=previous))
    torch.testing.assert_close(noisy.models, clean.models)
    torch.testing.assert_close(noisy.models[:, 7], previous[:, 7])


@pytest.mark.parametrize("received", [torch.ones(4, 7), torch.zeros(3, 5), torch.eye(4) - 0.25])
def test_odd_input_gives_a_proper_graph(received):
    weights = 10.0 ** torch.arange(0, -2 * len(received), -2, dtype=torch.float64)
    out = valid(TwoStep()(received, weights))
    assert float(out.graph.sum(1).min()) > 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_columns_shared_out_over_processes_change_nothing(masked, scope):
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(3)) > 0.2 if masked else None
    layers = LAYERS if scope == "layer" else None
    whole = TwoStep(graph_scope=scope)(received, weights, mask=mask, layers=layers)
    for bounds in ((0, 30, 90), (0, 45, 45, 90)):
        parts = run_sharded(
            lambda: TwoStep(graph_scope=scope), received, weights, mask=mask, layers=layers, bounds=bounds
        )
        torch.testing.assert_close(parts.models, whole.models, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(parts.graph, whole.graph, rtol=1e-7, atol=1e-8)
    if layers:
        assert whole.layer_graphs.shape == (4, CLIENTS, CLIENTS)


@pytest.mark.parametrize("setting", [{"gamma": 0}, {"beta": 0}, {"mu": -1}, {"fidelity": "equal"}, {"max_iter": 0}])
def test_a_wrong_setting_is_named(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        TwoStep(**setting)


def test_gamma_has_no_part_where_neighbours_are_asked_for():
    received = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    received[1] = received[0]  # an edge that would cost nothing
    without, with_it = (TwoStep(neighbours=2, gamma=gamma)(received, torch.ones(6)) for gamma in (0, 1))
    assert torch.equal(without.models, with_it.models) and torch.equal(without.graph, with_it.graph)

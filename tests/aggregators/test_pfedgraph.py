"""pFedGraph's rows against cvxpy, its limits, and the projection on the simplex."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.aggregators.pfedgraph import collaboration_graph, project_simplex


def some_round(clients=6, size=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(size, generator=generator).double()
    received = initial + torch.randn(clients, size, generator=generator).double() + 0.5
    return received, torch.rand(clients, generator=generator).double() + 0.1, initial


@pytest.mark.parametrize("lam", [0.05, 0.8, 10.0])
def test_rows_are_those_of_cvxpy(lam):
    cp = pytest.importorskip("cvxpy")
    received, weights, initial = some_round()
    out = build_aggregator("pfedgraph", lam=lam)(received, weights, initial=initial)
    zeta, updates = (weights / weights.sum()).numpy(), received - initial
    for k in range(6):
        delta = -torch.nn.functional.cosine_similarity(updates[k][None], updates, dim=1).numpy()
        a = cp.Variable(6)
        problem = cp.Problem(cp.Minimize(delta @ a + lam * cp.sum_squares(a - zeta)), [a >= 0, cp.sum(a) == 1])
        problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        torch.testing.assert_close(out.graph[k], torch.tensor(a.value), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.models, out.graph @ received)


def test_lam_zero_keeps_the_most_similar():
    received, weights, initial = some_round()
    out = build_aggregator("pfedgraph", lam=0)(received, weights, initial=initial)
    torch.testing.assert_close(out.graph, torch.eye(6).double())
    received[1] = initial + 2 * (received[0] - initial)  # parallel updates: a tie
    shared = build_aggregator("pfedgraph", lam=0)(received, torch.ones(6), initial=initial)
    assert shared.graph[0].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0, 0])
    torch.testing.assert_close(shared.models[0], (received[0] + received[1]) / 2)


def test_tiny_lam_goes_to_the_limit_and_huge_lam_to_fedavg():
    received, weights, initial = some_round()
    limit = build_aggregator("pfedgraph", lam=0)(received, weights, initial=initial)
    for lam in (1e-8, 1e-300):
        torch.testing.assert_close(
            build_aggregator("pfedgraph", lam=lam)(received, weights, initial=initial).graph, limit.graph
        )
    fedavg = build_aggregator("fedavg")(received, weights)
    huge = build_aggregator("pfedgraph", lam=1e8)(received, weights, initial=initial)
    torch.testing.assert_close(huge.graph, fedavg.graph, rtol=0, atol=2e-8)
    torch.testing.assert_close(huge.models, fedavg.models)


def test_a_model_that_has_not_moved_gets_the_mean():
    received, weights, initial = some_round()
    received[2] = initial
    out = build_aggregator("pfedgraph")(received, weights, initial=initial)
    torch.testing.assert_close(out.graph[2], weights / weights.sum())


def test_updates_not_models_are_compared():
    received, weights, initial = some_round()
    moved = build_aggregator("pfedgraph")(received + 100, weights, initial=initial + 100)
    torch.testing.assert_close(moved.graph, build_aggregator("pfedgraph")(received, weights, initial=initial).graph)


def test_becoming_local_is_said(caplog):
    received, weights, initial = some_round()
    with caplog.at_level(logging.WARNING):
        out = build_aggregator("pfedgraph", lam=1e-6)(received, weights, initial=initial)
    assert "more than 0.999" in out.info["warning"] and len(caplog.records) == 1


def test_clients_are_pulled_towards_the_direction_of_what_they_were_sent():
    (term,) = build_aggregator("pfedgraph").client_terms()
    x = torch.tensor([3.0, 4.0])
    assert float(term(x, torch.tensor([3.0, 4.0]))) == pytest.approx(-0.01)
    assert float(term(x, torch.tensor([-3.0, -4.0]))) == pytest.approx(0.01)
    assert build_aggregator("pfedgraph", lam_local=0).client_terms() == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_projection_on_the_simplex_is_optimal(values):
    v = torch.tensor(values, dtype=torch.float64)
    a = project_simplex(v)
    assert (a >= 0).all() and float(a.sum()) == pytest.approx(1, abs=1e-9)
    # Optimal if and only if v - a is the same where a > 0 and no larger elsewhere.
    level = (v - a)[a > 0]
    slack = 1e-9 * (1 + v.abs().max())
    assert level.max() - level.min() <= slack and ((v - a)[a == 0] <= level.min() + slack).all()


def test_projection_is_batched_and_takes_minus_infinity():
    v = torch.randn(3, 4, 5).double()
    torch.testing.assert_close(project_simplex(v)[1, 2], project_simplex(v[1, 2]))
    assert project_simplex(torch.tensor([-torch.inf, 0.2, 0.1, -torch.inf])).tolist() == pytest.approx(
        [0, 0.55, 0.45, 0]
    )


def test_collaboration_graph_ignores_a_common_shift_of_the_dissimilarities():
    delta, shares = torch.randn(4, 4).double(), torch.full((4,), 0.25).double()
    torch.testing.assert_close(collaboration_graph(delta + 7, shares, 0.8), collaboration_graph(delta, shares, 0.8))

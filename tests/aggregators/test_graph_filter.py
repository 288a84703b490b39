"""The plain graph filter against its closed form."""

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.graph import learn_graph


def some_round(clients=5, size=30):
    generator = torch.Generator().manual_seed(0)
    received = torch.randn(clients, size, generator=generator).double()
    return received, torch.rand(clients, generator=generator).double() + 0.2


@pytest.mark.parametrize("fidelity", ["shares", "scaled", "uniform"])
@pytest.mark.parametrize(("alpha", "mu"), [(0.05, 1.0), (0.5, 2.0)])
def test_closed_form(fidelity, alpha, mu):
    received, weights = some_round()
    out = build_aggregator("graph_filter", alpha=alpha, mu=mu, fidelity=fidelity)(received, weights)
    zeta = weights / weights.sum()
    Z = torch.diag({"shares": zeta, "scaled": 5 * zeta, "uniform": torch.ones(5).double()}[fidelity])
    W = learn_graph(torch.cdist(received, received) ** 2, alpha, 1.0, 1.0)
    L = torch.diag(W.sum(1)) - W
    torch.testing.assert_close(out.graph, W, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(out.models, torch.linalg.solve(Z + 2 * alpha / mu * L, Z @ received))
    assert out.info["edges"] == int((W > 0).sum()) // 2


def test_no_smoothing_is_local_and_endless_smoothing_is_the_mean_of_what_is_connected():
    received, weights = some_round()
    kept = build_aggregator("graph_filter", mu=1e12)(received, weights)
    torch.testing.assert_close(kept.models, received, rtol=1e-6, atol=1e-6)
    merged = build_aggregator("graph_filter", mu=1e-9)(received, weights)
    connected = torch.linalg.matrix_power(merged.graph + torch.eye(5), 5) > 0
    assert not connected.all(), "the case must have more than one component"
    for k in range(5):
        members = connected[k]
        mean = (weights[members] @ received[members]) / weights[members].sum()
        torch.testing.assert_close(merged.models[k], mean, rtol=1e-5, atol=1e-5)


def test_missing_entries_carry_no_fidelity():
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, ~mask.any(0)] = True
    out = build_aggregator("graph_filter")(received, weights, mask=mask, previous=torch.zeros_like(received))
    zeta, L = weights / weights.sum(), torch.diag(out.graph.sum(1)) - out.graph
    for j in range(received.shape[1]):
        Z = torch.diag(zeta * mask[:, j])
        expected = torch.linalg.solve(Z + 2 * 0.05 * L, Z @ received[:, j])
        torch.testing.assert_close(out.models[:, j], expected)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("settings", [{}, {"neighbours": 2}, {"noise_correction": "estimated"}])
def test_how_far_it_is_from_stationary_is_what_two_step_says_of_the_same_models(settings, missing):
    received, weights = some_round(8)
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.2 if missing else None
    info = build_aggregator("graph_filter", **settings)(received, weights, mask=mask).info
    once = build_aggregator("two_step", max_iter=1, eps=0.0, **settings)(received, weights, mask=mask).info
    assert info["stationarity_graph"] == pytest.approx(once["stationarity_graph"], rel=1e-6)
    assert 1e-4 < info["stationarity_graph"] < 1
    assert max(info["stationarity_models"], once["stationarity_models"]) < 1e-10  # filtered last

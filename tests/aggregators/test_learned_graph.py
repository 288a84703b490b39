"""What jgesr, two_step and graph_filter share: their constants, and the proximal term that their clients train with."""

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.client import ClientModule
from jgesr_lightning.graph import gradient_signals, learn_graph, pairwise_sq_distances

NAMES = ("jgesr", "two_step", "graph_filter")


@pytest.mark.parametrize("name", NAMES)
def test_clients_train_with_the_mu_of_the_server_unless_the_run_says_otherwise(name):
    assert [term.mu for term in build_aggregator(name).client_terms()] == [1.0]
    assert [term.mu for term in build_aggregator(name, mu=0.25).client_terms()] == [0.25]
    assert [term.mu for term in build_aggregator(name, mu=0.25).client_terms(3.0)] == [3.0]
    assert build_aggregator(name).client_terms(0) == ()


class Quadratic(torch.nn.Module):
    """Two parameters and nothing else."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mu", [1.0, 0.4])
def test_two_local_steps_on_a_quadratic_are_those_of_the_printed_update(name, mu):
    """x <- x - eta (grad f(x) + mu (x - psi)): the first step starts at psi, so that only the second feels the pull."""
    a, b = torch.tensor([3.0, 0.5], dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
    eta, sent = 0.1, torch.tensor([2.0, -1.0], dtype=torch.float64)
    net = Quadratic()
    client = ClientModule(net, lr=eta, terms=build_aggregator(name, mu=mu).client_terms())
    optimizer = torch.optim.SGD(net.parameters(), lr=eta)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (a * net.x.square() / 2 - b * net.x).sum() + sum(term(net.x, sent) for term in client.terms)
        loss.backward()
        optimizer.step()
    first = sent - eta * (a * sent - b)
    second = first - eta * (a * first - b + mu * (first - sent))
    torch.testing.assert_close(net.x.detach(), second, rtol=1e-14, atol=1e-14)
    assert not torch.allclose(second, first - eta * (a * first - b), rtol=1e-3)


def some_round(scale=1.0, noise=0.0):
    draw = torch.Generator().manual_seed(0)
    groups = torch.randn(3, 400, dtype=torch.float64, generator=draw)[torch.arange(12) % 3]
    clean = scale * (groups + 0.3 * torch.randn(12, 400, dtype=torch.float64, generator=draw))
    deviation = noise * scale * torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    received = clean + deviation[:, None] * torch.randn(12, 400, dtype=torch.float64, generator=draw)
    return received, torch.rand(12, dtype=torch.float64, generator=draw) + 0.1, deviation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [False, True])
def test_a_client_has_as_many_edges_as_asked_for_at_any_scale(name, missing):
    mask = torch.rand(12, 400, generator=torch.Generator().manual_seed(1)) > 0.1 if missing else None
    outs = []
    for scale in (1e-3, 1.0, 1e3):
        received, weights, _ = some_round(scale)
        settings = {"neighbours": 4, **({} if name == "graph_filter" else {"max_iter": 1, "eps": 0.0})}
        if name == "jgesr":
            settings |= {"max_iter": 60, "step": "backtracking"}
        out = build_aggregator(name, **settings)(received, weights, mask=mask)
        outs.append(out)
        torch.testing.assert_close(out.models / scale, outs[0].models / 1e-3, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(out.graph, outs[0].graph, rtol=1e-5, atol=1e-6)
    if name != "jgesr":
        assert abs(2 * outs[0].info["edges"] / 12 - 4) < 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [False, True])
def test_known_noise_is_taken_out_of_every_distance(name, missing):
    received, weights, deviation = some_round(noise=0.5)
    mask = torch.rand(12, 400, generator=torch.Generator().manual_seed(1)) > 0.1 if missing else None
    once = {} if name == "graph_filter" else {"max_iter": 1, "eps": 0.0}
    if name == "jgesr":
        pytest.skip("its graph is a step towards that of these distances")
    out = build_aggregator(name, noise_correction="known", **once)(received, weights, mask=mask, noise_std=deviation)
    filled = build_aggregator("local")(received, weights, mask=mask).models if missing else received
    if missing:  # the mean that fills a gap is that of the fidelity's weights
        zeta = weights / weights.sum()
        mean = (zeta[:, None] * mask * received).sum(0) / (zeta[:, None] * mask).sum(0)
        filled = torch.where(mask, received, mean)
    arrived = torch.full((12,), 400.0).double() if mask is None else mask.sum(1).double()
    share = arrived * deviation.square()
    D = (pairwise_sq_distances(filled) - share[:, None] - share).clamp_min(0)
    torch.testing.assert_close(out.graph, learn_graph(D, 0.05, 1.0, 1.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_that_known_noise_thins_out_is_restored(name):
    clean, weights, _ = some_round()
    noisy, _, deviation = some_round(noise=0.3)
    settings = {} if name == "graph_filter" else {"max_iter": 40 if name == "jgesr" else 1, "eps": 0.0}
    truth = build_aggregator(name, **settings)(clean, weights).graph
    plain = build_aggregator(name, **settings)(noisy, weights).graph
    better = build_aggregator(name, noise_correction="known", **settings)(noisy, weights, noise_std=deviation).graph
    # Noise in every distance makes every edge dearer: the graph thins out.
    assert float(plain.sum()) < 0.9 * float(truth.sum())
    assert abs(float(better.sum() - truth.sum())) < 0.7 * abs(float(plain.sum() - truth.sum()))


@pytest.mark.parametrize("name", ["two_step", "graph_filter"])
def test_estimated_noise_is_the_least_distance(name):
    received, weights, _ = some_round(noise=0.5)
    once = {} if name == "graph_filter" else {"max_iter": 1, "eps": 0.0}
    D = pairwise_sq_distances(received)
    D = (D - D[~torch.eye(12, dtype=torch.bool)].min()).clamp_min(0)
    out = build_aggregator(name, noise_correction="estimated", **once)(received, weights)
    torch.testing.assert_close(out.graph, learn_graph(D, 0.05, 1.0, 1.0), rtol=1e-6, atol=1e-8)


def test_known_without_deviations_and_none_are_the_same():
    received, weights, deviation = some_round(noise=0.5)
    plain = build_aggregator("jgesr")(received, weights, noise_std=deviation)
    unknown = build_aggregator("jgesr", noise_correction="known")(received, weights)
    assert torch.equal(plain.models, unknown.models)


def test_wrong_settings_are_named():
    for settings, message in (({"neighbours": 0}, "neighbours"), ({"noise_correction": "some"}, "noise_correction"),
                              ({"neighbours": 2, "alpha": 0}, "alpha"), ({"smoothing": "half"}, "smoothing"),
                              ({"stop": "never"}, "stop")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build_aggregator("jgesr", **settings)


def test_the_printed_smoothing_is_half_of_it():
    received, weights, _ = some_round()
    half = build_aggregator("jgesr", smoothing="printed", max_iter=1)(received, weights).models
    full = build_aggregator("jgesr", max_iter=1)(received, weights).models
    torch.testing.assert_close(2 * (half - received), full - received)


@pytest.mark.parametrize("name", ["jgesr", "two_step"])
def test_stationarity_is_a_rule_to_stop_by_and_is_reported(name):
    received, weights, _ = some_round()
    settings = {"step": "backtracking", "accelerated": True} if name == "jgesr" else {}
    out = build_aggregator(name, stop="stationarity", eps=1e-5, max_iter=20_000, **settings)(received, weights)
    assert out.info["converged"]
    zeta = weights / weights.sum()
    gradient = gradient_signals(out.models, out.graph, received, zeta, None, 0.05, 1.0)
    parts = (gradient_signals(out.models, out.graph, received, zeta, None, 0.0, 1.0).norm(),
             gradient_signals(out.models, out.graph, received, 0 * zeta, None, 0.05, 1.0).norm())  # fmt: skip
    assert out.info["stationarity_models"] == pytest.approx(float(gradient.norm() / sum(parts)), rel=1e-3, abs=1e-9)
    assert max(out.info["stationarity_models"], out.info["stationarity_graph"]) < 1e-5
    early = build_aggregator(name, max_iter=1, eps=0.0)(received, weights)
    assert max(early.info["stationarity_models"], early.info["stationarity_graph"]) > 1e-3

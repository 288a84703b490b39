"""What jgesr, two_step and graph_filter share: their constants, and the proximal term that their clients train with."""

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.client import ClientModule
from jgesr_lightning.graph import gradient_signals, learn_graph, pairwise_sq_distances, prox_log_degree
from jgesr_lightning.graph.problem import Problem
from tests.aggregators.sharding import run_sharded

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


@pytest.mark.parametrize("name", NAMES)
def test_estimated_noise_of_noisy_copies_is_that_which_was_added_and_leaves_their_groups(name):
    """Four groups of three equal models each, noise of one deviation: 2 sigma^2 d of every distance is noise."""
    size, sigma, draw = 20_000, 0.05, torch.Generator().manual_seed(0)
    group = torch.arange(12) % 4
    clean = 0.1 * torch.randn(4, size, dtype=torch.float64, generator=draw)[group]
    received = clean + sigma * torch.randn(12, size, dtype=torch.float64, generator=draw)
    D = pairwise_sq_distances(received)
    estimate = Problem(noise=None).scaled_to(D[None].numpy()).noise
    assert estimate == pytest.approx(2 * sigma**2 * size, rel=0.1)
    settings = {"alpha": 0.2, "noise_correction": "estimated"}
    if name == "jgesr":
        settings |= {"step": "backtracking", "max_iter": 300}
    weights = torch.ones(12, dtype=torch.float64)
    graph = build_aggregator(name, **settings)(received, weights).graph
    within = group[:, None] == group
    assert float(graph[~within].sum()) < 1e-6 * float(graph.sum())
    truth = learn_graph(pairwise_sq_distances(clean), 0.2, 1.0, 1.0)
    plain = build_aggregator(name, **(settings | {"noise_correction": "none"}))(received, weights).graph
    error, uncorrected = ((found - truth).sum(1).abs().max() for found in (graph, plain))
    assert float(error) < 0.5 * float(uncorrected)


@pytest.mark.parametrize("settings", [{"noise_correction": "known"}, {"layer_weights": "snr"}])
def test_what_needs_the_deviations_says_so(settings):
    received, weights, deviation = some_round(noise=0.5)
    layers = (received.shape[1],)
    with pytest.raises(ValueError, match="jgesr needs `noise_std`"):
        build_aggregator("jgesr", **settings)(received, weights, layers=layers)
    build_aggregator("jgesr", **settings)(received, weights, layers=layers, noise_std=deviation)
    build_aggregator("jgesr")(received, weights, layers=layers)


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


CANDIDATES = [
    {"distances": "updates"},
    {"distances": "directions", "noise_correction": "known"},
    {"memory": 0.5, "noise_correction": "estimated"},
    {"layer_weights": "snr", "noise_correction": "known"},
    {"distances": "directions", "layer_weights": "snr", "memory": 0.3, "noise_correction": "known", "neighbours": 3},
]
LAYERS = (150, 250)


def rounds_of(count, missing=True, clients=12):
    """Arguments of some rounds, in which different clients take part."""
    draw = torch.Generator().manual_seed(9)
    for number in range(count):
        received, weights, deviation = some_round(noise=0.5)
        received = received + 0.3 * torch.randn(received.shape, dtype=torch.float64, generator=draw)
        yield {
            "received": received,
            "weights": weights,
            "mask": torch.rand(received.shape, generator=draw) > 0.1 if missing else None,
            "previous": 0.2 * torch.randn(received.shape, dtype=torch.float64, generator=draw),
            "initial": 0.1 * torch.randn(received.shape[1], dtype=torch.float64, generator=draw),
            "present": torch.tensor([(k + number) % 4 > 0 for k in range(clients)]),
            "layers": LAYERS,
            "noise_std": deviation,
        }


def aims(build, count=3, **settings):
    """Return the method after some rounds, what it aimed at and what came out."""
    method, found = build(**settings), []
    aimed = method.aimed
    method.aimed = lambda *arguments: found.append(aimed(*arguments)) or found[-1]
    outs = [method(**each) for each in rounds_of(count)]
    return [aim.distances for aim in found], outs


@pytest.mark.parametrize("settings", CANDIDATES)
def test_the_first_graph_is_that_of_the_distances_aimed_at(settings):
    once = {"max_iter": 1, "eps": 0.0}
    found, outs = aims(lambda **given: build_aggregator("graph_filter", **given), **settings)
    again, solved = aims(lambda **given: build_aggregator("two_step", **given, **once), **settings)
    for aim, other, out, alternated in zip(found, again, outs, solved, strict=True):
        assert torch.equal(aim, other)
        there = out.graph.sum(1).nonzero().squeeze(1)
        expected = learn_graph(aim[0], 0.05, 1.0, 1.0, neighbours=settings.get("neighbours"))
        torch.testing.assert_close(out.graph[there][:, there], expected, rtol=1e-6, atol=1e-8)
        # Filled gaps of a solver start from the same numbers; its graph is learnt from D - (D_0 - aim).
        torch.testing.assert_close(alternated.graph, out.graph, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alternated.models, out.models, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_a_step_of_jgesr_is_the_prox_at_the_distances_aimed_at(scope):
    settings = {"distances": "updates", "memory": 0.5, "noise_correction": "known", "graph_scope": scope}
    found, outs = aims(lambda **given: build_aggregator("jgesr", max_iter=1, **given), count=2, **settings)
    for each, aim, out in zip(rounds_of(2), found, outs, strict=True):
        there = each["present"].nonzero().squeeze(1)
        filled = torch.where(each["mask"], each["received"], each["previous"])[there]
        graphs = out.graph[None] if scope == "model" else out.layer_graphs
        spans = [slice(0, 400)] if scope == "model" else [slice(0, 150), slice(150, 400)]
        for g, columns in enumerate(spans):
            unit = torch.nn.functional.normalize(filled[:, columns], dim=1)
            start = (unit @ unit.T).clamp_min(0).fill_diagonal_(0)
            expected = prox_log_degree(start - 0.05 * aim[g], 1.0, 1.0, 1.0)
            torch.testing.assert_close(graphs[g][there][:, there], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_powers_of_the_shares_lie_between_shares_and_uniform(name, power):
    received, weights, _ = some_round()
    zeta = weights / weights.sum()
    few = {} if name == "graph_filter" else {"max_iter": 3, "eps": 0.0}
    by_power = build_aggregator(name, fidelity_power=power, **few)
    torch.testing.assert_close(by_power(received, weights).models, expected_filter(name, few, received, zeta**power))
    scaled = build_aggregator(name, fidelity="scaled", fidelity_power=power, mu=0.1, **few)
    Z = zeta**power / (zeta**power).mean()
    torch.testing.assert_close(scaled(received, weights).models, expected_filter(name, few, received, Z, mu=0.1))


def expected_filter(name, few, received, Z, mu=1.0):
    """The same method with Z handed to it, past its own choice of weights."""
    method = build_aggregator(name, mu=mu, **few)
    method.weights = lambda upload: Z
    return method(received, torch.ones(len(received))).models


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("fidelity", ["shares", "uniform"])
def test_a_client_that_puts_in_its_own_model_minimises_the_objective_with_it(name, missing, fidelity):
    settings = {"fidelity": fidelity, **({} if name == "graph_filter" else {"max_iter": 20})}
    received, weights, _ = some_round(noise=0.5)
    clean, _, _ = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.2 if missing else None
    psi = build_aggregator(name, **settings)(received, weights, mask=mask).models
    out = build_aggregator(name, own="clean", **settings)(received, weights, mask=mask)
    z = weights / weights.sum() if fidelity == "shares" else torch.ones(12).double()
    for k in range(12):
        w = out.own.weights[0, k]
        assert 0 < w < 1
        formed, told, known = psi.clone(), received.clone(), torch.ones(received.shape, dtype=torch.bool)
        formed[k], told[k] = w * clean[k] + (1 - w) * out.own.rest[k], clean[k]
        gradient = gradient_signals(formed, out.graph, told, z, known, 0.05, 1.0)[k]
        assert float(gradient.abs().max()) < 1e-10
        # What the server takes it for: the same with what arrived, the rest alone in gaps.
        believed = w * received[k] + (1 - w) * out.own.rest[k]
        believed = believed if mask is None else torch.where(mask[k], believed, out.own.rest[k])
        torch.testing.assert_close(out.models[k], believed)
    if name != "jgesr" and not missing:  # exact minimisers over the models
        torch.testing.assert_close(out.models, psi)


def test_own_models_with_a_graph_a_layer_have_a_weight_a_layer():
    received, weights, _ = some_round(noise=0.5)
    settings = {"graph_scope": "layer", "max_iter": 1, "eps": 0.0}
    out = build_aggregator("two_step", own="clean", **settings)(received, weights, layers=LAYERS)
    assert out.own.weights.shape == (2, 12)
    begin = 0
    for layer, width in enumerate(LAYERS):
        part = received[:, begin : begin + width]
        alone = build_aggregator("two_step", own="clean", max_iter=1, eps=0.0)(part, weights)
        torch.testing.assert_close(out.own.weights[layer], alone.own.weights[0])
        torch.testing.assert_close(out.own.rest[:, begin : begin + width], alone.own.rest)
        begin += width


def test_no_smoothing_leaves_a_client_all_of_its_own():
    received, weights, _ = some_round()
    out = build_aggregator("graph_filter", alpha=0, own="clean")(received, weights)
    assert torch.equal(out.own.weights, torch.ones(1, 12).double())


@pytest.mark.parametrize("name", [*NAMES, "local"])
def test_those_who_are_sent_nothing_are_marked(name):
    method = build_aggregator(name, own="clean")
    for each in rounds_of(1):
        there = each["present"]
        out = method(**each)
        assert torch.equal(out.own.weights.isnan(), ~there[None])
        assert torch.equal(out.own.rest[~there], each["previous"][~there])
        one = torch.arange(12) == 5
        alone = method(**{**each, "present": one})
        assert torch.equal(alone.own.weights[0, one], torch.ones(1).double())
        nobody = method(**{**each, "present": one & ~one})
        assert bool(nobody.own.weights.isnan().all()) and torch.equal(nobody.models, each["previous"])
        del each["present"]
        assert not method(**each).own.weights.isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", CANDIDATES)
def test_candidates_over_processes_are_those_in_one(name, settings):
    settings = {**settings, "own": "clean"} if name == "graph_filter" else {**settings, "own": "clean", "max_iter": 5}
    whole = build_aggregator(name, **settings)
    shards = [build_aggregator(name, **settings) for _ in range(3)]
    for each in rounds_of(2):
        expected = whole(**each)
        order = iter(shards)
        out = run_sharded(lambda order=order: next(order), **each, bounds=(0, 100, 300, 400))
        torch.testing.assert_close(out.models, expected.models, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(out.graph, expected.graph, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(out.own.rest, expected.own.rest, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(out.own.weights, expected.own.weights, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_survives_and_nothing_is_kept_without_memory(name):
    settings = {} if name == "graph_filter" else {"max_iter": 5}
    first = build_aggregator(name, memory=0.7, **settings)
    second = build_aggregator(name, memory=0.7, **settings)
    for number, each in enumerate(rounds_of(4)):
        out = first(**each)
        if number > 0:
            again = second(**each)
            assert torch.equal(again.models, out.models) and torch.equal(again.graph, out.graph)
        second.load_state(first.state())
    forgetful = build_aggregator(name, **settings)
    forgetful(**each)
    assert forgetful.state() == {}
    assert not torch.equal(forgetful(**each).graph, out.graph)
    with pytest.raises(ValueError, match="distances of former rounds"):
        second.load_state({"distances": [1]})


def test_candidates_that_cannot_be_are_refused():
    received, weights, deviation = some_round()
    for settings, message in (
        ({"memory": 1.0}, "memory is 1.0; it must be below 1"),
        ({"memory": -0.1}, "memory"),
        ({"fidelity_power": 1.1}, "fidelity_power"),
        ({"fidelity": "uniform", "fidelity_power": 0.5}, "fidelity_power has no part"),
        ({"distances": "cosine"}, "distances"),
        ({"layer_weights": "some"}, "layer_weights"),
        ({"layer_weights": "snr", "graph_scope": "layer"}, "needs graph_scope=model"),
        ({"own": "noisy"}, "own"),
        ({"gamma": 0.0, "alpha": 0.0}, "gamma"),
        ({"gamma": 0.0, "noise_correction": "estimated"}, "gamma"),
        ({"gamma": 0.0, "distances": "updates"}, "gamma"),
        ({"gamma": 0.0, "groups": 0.5}, "gamma"),
        ({"init": "previous", "neighbours": 3}, "neighbours goes by the distances at the start"),
        ({"init": "previous", "noise_correction": "estimated"}, "noise_correction goes by .* needs init=received"),
        ({"init": "previous", "noise_correction": "known"}, "noise_correction goes by .* needs init=received"),
        ({"init": "previous", "distances": "updates"}, "distances goes by .* needs init=received"),
        ({"init": "previous", "layer_weights": "snr"}, "layer_weights goes by .* needs init=received"),
        ({"init": "previous", "memory": 0.5}, "memory goes by .* needs init=received"),
    ):
        with pytest.raises(ValueError, match=message):
            build_aggregator("jgesr", **settings)
    assert build_aggregator("jgesr", gamma=0.0).gamma == 0
    assert build_aggregator("graph_filter", gamma=0.0, noise_correction="known", neighbours=2).gamma == 0
    with pytest.raises(ValueError, match="layer_weights is 'snr', which needs `layers`"):
        build_aggregator("graph_filter", layer_weights="snr")(received, weights, noise_std=deviation)

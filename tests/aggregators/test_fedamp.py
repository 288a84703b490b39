"""FedAMP against its formula, and the settings under which it degenerates."""

import logging
import math

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator


def attentive(received, sigma, a):
    """u_k = (1 - sum_j xi_kj) x_k + sum_j xi_kj x_j, pair by pair."""
    models, weights = torch.zeros_like(received), torch.zeros(len(received), len(received)).double()
    for k, own in enumerate(received):
        models[k] = own
        weights[k, k] = 1
        for j, other in enumerate(received):
            if j != k:
                xi = a / sigma * math.exp(-float((own - other).square().sum()) / sigma)
                models[k] += xi * (other - own)
                weights[k, j] += xi
                weights[k, k] -= xi
    return models, weights


def heuristic(received, sigma, own):
    count = len(received)
    weights = torch.zeros(count, count).double()
    for k in range(count):
        scores = {
            j: math.exp(sigma * float(torch.nn.functional.cosine_similarity(received[k], received[j], dim=0)))
            for j in range(count)
            if j != k
        }
        for j, score in scores.items():
            weights[k, j] = (1 - own) * score / sum(scores.values())
        weights[k, k] = own
    return weights @ received, weights


def some_models(clients=5, size=12, seed=0):
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(("sigma", "a"), [(25.0, 1.0), (10.0, 2.0), (40.0, 0.5)])
def test_paper_variant_is_the_formula(sigma, a):
    received = some_models()
    out = build_aggregator("fedamp", variant="paper", sigma=sigma, a=a)(received, torch.rand(5) + 0.1)
    models, weights = attentive(received, sigma, a)
    assert weights.diagonal().min() > 0, "the case must be one where the formula is an average"
    torch.testing.assert_close(out.models, models)
    torch.testing.assert_close(out.graph, weights)
    assert out.info["shortened_rows"] == 0


@pytest.mark.parametrize(("sigma", "own"), [(25.0, None), (1.0, 0.3), (0.1, 0.0), (5.0, 1.0)])
def test_heuristic_variant_is_the_formula(sigma, own):
    received = some_models()
    out = build_aggregator("fedamp", sigma=sigma, self_weight=own)(received, torch.rand(5) + 0.1)
    models, weights = heuristic(received, sigma, 1 / 5 if own is None else own)
    torch.testing.assert_close(out.models, models)
    torch.testing.assert_close(out.graph, weights)


@pytest.mark.parametrize("variant", ["paper", "heuristic"])
def test_self_term_is_the_clients_own_last_model(variant):
    received, previous = some_models(), some_models(seed=1)
    fedamp = build_aggregator("fedamp", variant=variant)
    out = fedamp(received, torch.ones(5), previous=previous)
    torch.testing.assert_close(out.models, out.graph @ received)
    torch.testing.assert_close(out.graph.sum(1), torch.ones(5).double())


def test_tiny_sigma_is_local_and_says_so(caplog):
    received = some_models()
    fedamp = build_aggregator("fedamp", variant="paper", sigma=1e-3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = fedamp(received, torch.ones(5))
    torch.testing.assert_close(out.models, received)
    assert "more than 0.999" in out.info["warning"]
    assert len(caplog.records) == 1, "once in the log, not every round"


def test_settings_that_share_do_not_warn(caplog):
    with caplog.at_level(logging.WARNING):
        for variant in ("paper", "heuristic"):
            assert "warning" not in build_aggregator("fedamp", variant=variant)(some_models(), torch.ones(5)).info
    assert not caplog.records


def test_huge_sigma_shares_evenly():
    received = some_models()
    out = build_aggregator("fedamp", variant="paper", sigma=1e9, a=0.1e9)(received, torch.ones(5))
    expected = torch.full((5, 5), 0.1).double().fill_diagonal_(0.6)
    torch.testing.assert_close(out.graph, expected)
    attention = build_aggregator("fedamp", sigma=1e9)(received, torch.ones(5)).graph
    others = attention.clone().fill_diagonal_(0)
    assert torch.isfinite(attention).all() and (others.max(1).values > 0.799).all(), "all on the most similar"
    even = build_aggregator("fedamp", sigma=1e-9)(received, torch.ones(5)).graph
    torch.testing.assert_close(even, torch.full((5, 5), 0.2).double())


def test_a_step_too_long_stays_an_average():
    received = some_models()
    out = build_aggregator("fedamp", variant="paper", sigma=50.0, a=500.0)(received, torch.ones(5))
    assert out.info["shortened_rows"] == 5
    _, weights = attentive(received, 50.0, 500.0)
    expected = weights.fill_diagonal_(0) / weights.sum(1, keepdim=True)
    torch.testing.assert_close(out.graph, expected)


def test_zero_models_have_no_direction_and_share_evenly():
    out = build_aggregator("fedamp")(torch.zeros(4, 3), torch.ones(4))
    torch.testing.assert_close(out.graph, torch.full((4, 4), 0.25).double())


def test_close_models_far_from_the_origin():
    received = 1e6 + 1e-2 * some_models()
    out = build_aggregator("fedamp", variant="paper", sigma=1e-3, a=1e-3)(received, torch.ones(5))
    _, weights = attentive(received, 1e-3, 1e-3)
    torch.testing.assert_close(
        out.graph, weights.fill_diagonal_(0) + torch.diag(out.graph.diagonal()), rtol=1e-5, atol=0
    )


def test_clients_are_pulled_by_lam_over_2a():
    (term,) = build_aggregator("fedamp", lam=3.0, a=2.0).client_terms()
    x, sent = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert float(term(x, sent)) == pytest.approx(3 / (2 * 2) * 5)
    assert [term.mu for term in build_aggregator("fedamp", lam=3.0).client_terms(0.5)] == [0.5, 3.0]
    assert build_aggregator("fedamp", lam=0).client_terms() == ()


def test_the_own_weight_is_refused_where_it_has_no_part():
    with pytest.raises(ValueError, match="self_weight has no part in variant 'paper'"):
        build_aggregator("fedamp", variant="paper", self_weight=0.5)

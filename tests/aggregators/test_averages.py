"""local, fedavg, fedprox and median against a few lines each."""

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.aggregators.median import weighted_median
from jgesr_lightning.graph.gram import chunks


def masked_mean(received, weights, mask, previous):
    """One coordinate at a time, in Python's own floats."""
    expected = torch.empty_like(received)
    for j in range(received.shape[1]):
        who = [k for k in range(len(received)) if mask[k, j]]
        for k in range(len(received)):
            if who:
                total = sum(float(weights[i]) for i in who)
                expected[k, j] = sum(float(weights[i]) * float(received[i, j]) for i in who) / total
            else:
                expected[k, j] = previous[k, j]
    return expected


def test_sizes_900_and_100_weigh_nine_to_one():
    received = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
    out = build_aggregator("fedavg")(received, torch.tensor([900, 100]))
    torch.testing.assert_close(out.models, torch.tensor([[0.9, 1.0], [0.9, 1.0]]))
    torch.testing.assert_close(out.graph, torch.tensor([[0.9, 0.1], [0.9, 0.1]], dtype=torch.float64))


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_mean_over_what_arrived(name):
    torch.manual_seed(0)
    received, previous = torch.randn(4, 50).double(), torch.randn(4, 50).double()
    weights, mask = torch.rand(4).double() + 0.1, torch.rand(4, 50) < 0.4
    assert (~mask.any(0)).any(), "the case must include a coordinate that nobody delivered"
    out = build_aggregator(name)(received, weights, mask=mask, previous=previous)
    torch.testing.assert_close(out.models, masked_mean(received, weights, mask, previous))


def test_mean_is_accurate_in_float32():
    torch.manual_seed(0)
    received, weights = torch.randn(20, 1000), torch.rand(20).double()
    exact = (weights / weights.sum()) @ received.double()
    models = build_aggregator("fedavg")(received, weights).models
    torch.testing.assert_close(models, exact.float().expand(20, -1), rtol=2e-7, atol=0)


def test_averages_over_several_chunks_of_columns():
    torch.manual_seed(0)
    received = torch.randn(3, 200_001)
    assert len(list(chunks(received.shape[1:], len(received), received.device))) > 1
    mask = torch.rand(received.shape) < 0.5
    previous = torch.randn_like(received)
    out = build_aggregator("fedavg")(received, torch.ones(3), mask=mask, previous=previous)
    arrived = torch.where(mask, received, 0).double().sum(0) / mask.sum(0)
    expected = torch.where(mask.any(0), arrived.float(), previous)
    torch.testing.assert_close(out.models, expected)


def test_fedprox_is_fedavg_with_a_pull():
    torch.manual_seed(0)
    received, weights = torch.randn(4, 9), torch.rand(4)
    fedprox, fedavg = build_aggregator("fedprox"), build_aggregator("fedavg")
    assert torch.equal(fedprox(received, weights).models, fedavg(received, weights).models)
    assert [term.mu for term in fedprox.client_terms()] == [0.01]
    assert [term.mu for term in fedprox.client_terms(0.3)] == [0.3]
    assert fedprox.client_terms(0) == () == build_aggregator("fedprox", mu_prox=0).client_terms()
    assert fedavg.client_terms() == () == fedavg.client_terms(0)
    assert [term.mu for term in fedavg.client_terms(0.3)] == [0.3]


def test_local_is_what_arrived():
    torch.manual_seed(0)
    received, previous, mask = torch.randn(3, 8), torch.randn(3, 8), torch.rand(3, 8) < 0.5
    out = build_aggregator("local")(received, torch.ones(3), mask=mask, previous=previous)
    assert torch.equal(out.models, torch.where(mask, received, previous))
    assert torch.equal(out.graph, torch.eye(3, dtype=torch.float64))
    assert torch.equal(build_aggregator("local")(received, torch.ones(3)).models, received)


def test_local_without_previous_fills_gaps_with_the_mean_of_those_who_delivered():
    received = torch.tensor([[1.0, 2.0], [4.0, 7.0], [9.0, 9.0]])
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    out = build_aggregator("local")(received, torch.tensor([2.0, 1.0, 1.0]), mask=mask)
    torch.testing.assert_close(out.models, torch.tensor([[1.0, 0.0], [4.0, 0.0], [2.0, 0.0]]))


@pytest.mark.parametrize("clients", [3, 4, 7])
def test_median_is_numpys(clients):
    torch.manual_seed(clients)
    received = torch.randn(clients, 40)
    out = build_aggregator("median")(received, torch.rand(clients) + 0.1)
    torch.testing.assert_close(out.models, received.quantile(0.5, dim=0).expand(clients, -1))


def test_median_over_what_arrived():
    torch.manual_seed(0)
    received, previous, mask = torch.randn(5, 60), torch.randn(5, 60), torch.rand(5, 60) < 0.4
    out = build_aggregator("median")(received, torch.ones(5), mask=mask, previous=previous)
    middle = torch.where(mask, received, torch.nan).nanquantile(0.5, dim=0)
    torch.testing.assert_close(out.models, torch.where(middle.isnan(), previous, middle))


def test_weighted_median_repeats_clients_by_their_weight():
    torch.manual_seed(0)
    received, counts = torch.randn(5, 30), torch.tensor([1, 4, 2, 3, 2])
    out = build_aggregator("median", weighted=True)(received, counts)
    repeated = received.repeat_interleave(counts, 0)
    torch.testing.assert_close(out.models, repeated.quantile(0.5, dim=0).expand(5, -1))


def test_median_withstands_a_minority():
    received = torch.zeros(5, 6)
    received[:2] = 1e6
    assert (build_aggregator("median")(received, torch.ones(5)).models == 0).all()


def test_median_graph_counts_who_supplied_it():
    received = torch.tensor([[0.0, 5.0, 0.0, 1.0], [1.0, 1.0, 1.0, 5.0], [2.0, 0.0, 2.0, 0.0]])
    out = build_aggregator("median")(received, torch.ones(3))
    expected = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64).expand(3, -1)
    torch.testing.assert_close(out.graph, expected)


def test_weighted_median_says_where_there_was_nothing():
    values = torch.tensor([[torch.inf, torch.inf], [1.0, torch.inf]])
    shares = torch.tensor([[0.0, 0.0], [0.3, 0.0]], dtype=torch.float64)
    middle, _, anything = weighted_median(values, shares)
    assert anything.tolist() == [False, True] and middle[1] == 1

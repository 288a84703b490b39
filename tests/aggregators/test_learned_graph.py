"""What jgesr, two_step and graph_filter share: their constants, and the proximal term that their clients train with."""

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.client import ClientModule

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

"""The newcomer's edges against a general convex solver, its model against the stationary point by autograd."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.trained.joining import edge_weights, joined_model


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 12),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    beta=st.sampled_from([0.1, 1.0, 5.0]),
    gamma=st.sampled_from([0.1, 1.0]),
)
def test_edges_minimise_the_newcomers_part_of_the_objective(seed, clients, scale, beta, gamma):
    draw = np.random.default_rng(seed)
    distances, degrees = scale * draw.uniform(0, 20, clients), draw.uniform(0.1, 4, clients)
    w = edge_weights(torch.tensor(distances), torch.tensor(degrees), 0.05, beta, gamma).numpy()
    v = cp.Variable(clients, nonneg=True)
    costs = 0.05 * distances + gamma
    barrier = cp.log(cp.sum(v)) + cp.sum(cp.log(degrees + v))
    cp.Problem(cp.Minimize(cp.sum(cp.multiply(costs, v)) - beta * barrier)).solve(solver=cp.CLARABEL)

    def objective(w):
        return costs @ w - beta * np.log(w.sum()) - beta * np.log(degrees + w).sum()

    size = costs.max() + beta / w.sum()
    gradient = costs - beta / w.sum() - beta / (degrees + w)
    assert (w >= 0).all()
    assert objective(w) <= objective(np.maximum(v.value, 0)) + 1e-6 * (1 + abs(objective(w)))
    assert np.abs(gradient[w > 0]).max() <= 1e-8 * size
    assert (gradient >= -1e-8 * size).all()


def test_the_joined_model_is_the_minimiser_for_these_edges():
    torch.manual_seed(0)
    x, models, weights = torch.randn(7).double(), torch.randn(3, 7).double(), torch.tensor([0.5, 0.0, 2.0]).double()
    psi = joined_model(x, weights, models, 0.3, 1.5, 0.2).requires_grad_()
    value = 1.5 * 0.2 / 2 * (psi - x).square().sum() + 0.3 * (weights * (psi - models).square().sum(1)).sum()
    (gradient,) = torch.autograd.grad(value, psi)
    assert float(gradient.abs().max()) < 1e-14


def test_a_free_edge_is_refused():
    with pytest.raises(ValueError, match="cost nothing"):
        edge_weights(torch.tensor([0.0, 1.0]), torch.ones(2), 0.05, 1.0, 0.0)


@pytest.mark.parametrize("distance", [float("nan"), float("inf")])
def test_a_distance_that_is_no_number_is_said_to_be_that(distance):
    with pytest.raises(ValueError, match="is not at a finite distance from each client's"):
        edge_weights(torch.tensor([distance, 1.0]), torch.ones(2), 0.05, 1.0, 0.1)

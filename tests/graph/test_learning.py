"""Graph learning: optimality conditions, the scaling law, an independent solver."""

import warnings

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.graph import GraphNotConverged, gradient_graph, interior_point, learn_graph, pairwise_sq_distances


def violation(X: torch.Tensor, W: torch.Tensor, alpha: float, beta: float, gamma: float) -> float:
    gradient = gradient_graph(X, W, alpha, beta, gamma)
    size = alpha * pairwise_sq_distances(X) + gamma
    off = ~torch.eye(len(W), dtype=torch.bool)
    return float((torch.where(W > 0, gradient.abs(), (-gradient).clamp_min(0)) / size)[off].max())


@pytest.mark.parametrize("nodes", [2, 3, 8, 20])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("alpha", "beta", "gamma"), [(0.05, 1, 1), (1, 1, 0), (1e-3, 1e3, 1)])
def test_optimality_conditions(nodes: int, scale: float, alpha: float, beta: float, gamma: float) -> None:
    X = scale * torch.randn(nodes, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))
    W = learn_graph(pairwise_sq_distances(X), alpha, beta, gamma)
    assert torch.equal(W, W.T)
    assert float(W.min()) >= 0
    assert float(W.sum(-1).min()) > 0
    assert violation(X, W, alpha, beta, gamma) < 1e-9


def test_scaling_law() -> None:
    D = pairwise_sq_distances(torch.randn(7, 12, dtype=torch.float64))
    W = learn_graph(D, 0.2, 1.5, 0.8)
    torch.testing.assert_close(learn_graph(D * 10, 0.02, 1.5, 0.8), W, rtol=1e-9, atol=1e-12)  # alpha D counts
    torch.testing.assert_close(learn_graph(D, 0.2, 4.5, 0.8), 3 * W, rtol=1e-9, atol=1e-12)  # linear in beta
    torch.testing.assert_close(learn_graph(D, 1.0, 1.5, 4.0), W / 5, rtol=1e-9, atol=1e-12)  # inverse in the costs


def test_agrees_with_an_independent_solver() -> None:
    nodes, alpha, beta, gamma = 8, 0.3, 1.2, 0.5
    X = torch.randn(nodes, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    D = pairwise_sq_distances(X)
    W = learn_graph(D, alpha, beta, gamma)
    rows, columns = np.triu_indices(nodes, 1)
    w = cvxpy.Variable(len(rows), nonneg=True)
    degree = np.zeros((nodes, len(rows)))
    degree[rows, np.arange(len(rows))] = degree[columns, np.arange(len(rows))] = 1
    costs = alpha * D.numpy()[rows, columns] + gamma
    problem = cvxpy.Problem(cvxpy.Minimize(costs @ w - beta * cvxpy.sum(cvxpy.log(degree @ w))))
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    ours, theirs = W.numpy()[rows, columns], np.maximum(w.value, 0)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)  # the root of its gap, which varies between machines
    values = [costs @ weights - beta * np.log(degree @ weights).sum() for weights in (ours, theirs)]
    assert -1e-8 < values[0] - values[1] < 1e-12


def test_batch_equals_loop_and_equal_nodes_are_treated_alike() -> None:
    D = pairwise_sq_distances(torch.randn(3, 6, 9, dtype=torch.float64))
    D[2] = 0
    together = learn_graph(D, 1.0, 1.0, 0.5)
    for i in range(3):
        torch.testing.assert_close(together[i], learn_graph(D[i], 1.0, 1.0, 0.5), rtol=1e-9, atol=1e-11)
    off = ~torch.eye(6, dtype=torch.bool)
    assert float(together[2][off].max() - together[2][off].min()) < 1e-12


def test_an_edge_that_costs_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive cost"):
        learn_graph(torch.zeros(3, 3), 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="positive"):
        learn_graph(torch.ones(3, 3), 1.0, 0.0, 1.0)


@pytest.mark.parametrize("gamma", [1e-1, 1e-3, 1e-5, 1e-7])
def test_pairs_of_equal_rows_with_cheap_edges(gamma):
    X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[1], X[3] = X[0], X[2]
    D = pairwise_sq_distances(X)
    W = learn_graph(D, 1.0, 1.0, gamma)
    degrees = W.sum(1)
    gain = 1 / degrees[:, None] + 1 / degrees
    gradient = (D + gamma - gain) / (D + gamma + gain)
    off = ~torch.eye(6, dtype=torch.bool)
    assert gradient[off & (W > 0)].abs().max() < 1e-10
    assert gradient[off].min() > -1e-10


def unmet(cost: np.ndarray, W: torch.Tensor) -> float:
    """Return by how much the optimality conditions of beta = 1 fail, relative to their terms."""
    weights = W.numpy()
    degrees = weights.sum(1)
    gain = 1 / degrees[:, None] + 1 / degrees
    left = (gain - cost) / (gain + cost)
    return float(np.where(weights > 0, abs(left), left)[~np.eye(len(cost), dtype=bool)].max())


@given(
    st.integers(2, 12), st.floats(0, 100), st.sampled_from(["edges", "nodes", "two"]), st.integers(0, 2**31),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_costs_however_far_apart(nodes: int, decades: float, kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    if kind == "edges":
        cost = 10 ** random.uniform(-decades / 2, decades / 2, (nodes, nodes))
    else:  # clients that came apart, each as far as it likes or all alike
        far = 10 ** (
            decades / 4 * random.random((nodes, 1)) if kind == "nodes" else 10.0 * (random.random((nodes, 1)) < 0.3)
        )
        cost = 1 + 0.05 * (((x := random.standard_normal((nodes, 4)) * far)[:, None] - x) ** 2).sum(-1)
    cost = np.triu(cost, 1) + np.triu(cost, 1).T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        W = learn_graph(torch.from_numpy(cost), 1.0, 1.0, 0.0)
    assert torch.equal(W, W.T)
    assert unmet(cost, W) < 1e-10


@pytest.mark.parametrize("far", [1.0, 1e3, 1e8, 1e14, 1e30, 1e100])
def test_three_nodes_of_which_one_is_far(far: float) -> None:
    """Edges cost a = 2 and twice b >= a: lam = (1, 1, b - 1), w_13 = w_23 = 1 / (2 (b - 1)), w_12 = 1 - w_13."""
    b = 1 + far
    W = learn_graph(torch.tensor([[0, 2.0, b], [2.0, 0, b], [b, b, 0]], dtype=torch.float64), 1.0, 1.0, 0.0)
    assert W[0, 2].item() == pytest.approx(0.5 / far, rel=1e-10)
    assert W[1, 2].item() == pytest.approx(0.5 / far, rel=1e-10)
    assert W[0, 1].item() == pytest.approx(1 - 0.5 / far, rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_does_not_choose_among_graphs_that_are_as_good(seed: int) -> None:
    random = np.random.default_rng(seed)
    group, x = random.integers(0, 3, 12), random.standard_normal((12, 5))
    cost = 1 + 0.05 * ((x[:, None] - x) ** 2).sum(-1)
    across = group[:, None] != group
    cost = np.where(across, cost[across].mean(), cost)  # tied
    error = np.triu(1e-16 * random.integers(-4, 5, cost.shape), 1)
    found, other = (learn_graph(torch.from_numpy(c), 1.0, 1.0, 0.0) for c in (cost, cost * (1 + error + error.T)))
    torch.testing.assert_close(other, found, rtol=0, atol=1e-9)


def test_what_is_not_solved_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    D = pairwise_sq_distances(torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    monkeypatch.setattr(interior_point, "_STEPS", 3)
    with pytest.warns(GraphNotConverged, match="not converged"):
        learn_graph(D, 1.0, 1.0, 1.0)

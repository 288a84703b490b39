"""Graph learning: optimality conditions, the scaling law, an independent solver."""

import cvxpy
import numpy as np
import pytest
import torch

from jgesr_lightning.graph import GraphNotConverged, gradient_graph, learn_graph, pairwise_sq_distances


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
    cost = (alpha * D.numpy()[rows, columns] + gamma) @ w - beta * cvxpy.sum(cvxpy.log(degree @ w))
    problem = cvxpy.Problem(cvxpy.Minimize(cost))
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    np.testing.assert_allclose(W.numpy()[rows, columns], w.value, atol=1e-6)


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


def test_costs_beyond_double_precision_are_reported():
    X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[1] = X[0]
    with pytest.warns(GraphNotConverged, match="not converged"):
        learn_graph(pairwise_sq_distances(X), 1.0, 1.0, 1e-12)

"""Laplacian algebra: exact small cases and the adjoint identities."""

import pytest
import torch

from jgesr_lightning.graph import distances_from_gram, gram, laplacian
from tests.graph.algebra import degrees, degrees_adjoint, from_upper_triangle, normalized_adjacency, upper_triangle


def random_graph(*shape: int) -> torch.Tensor:
    edges = torch.rand(*shape[:-1], shape[-1] * (shape[-1] - 1) // 2, dtype=torch.float64)
    return from_upper_triangle(edges, shape[-1])


def test_laplacian_of_a_path() -> None:
    W = torch.tensor([[0.0, 2.0, 0.0], [2.0, 0.0, 3.0], [0.0, 3.0, 0.0]])
    assert torch.equal(laplacian(W), torch.tensor([[2.0, -2.0, 0.0], [-2.0, 5.0, -3.0], [0.0, -3.0, 3.0]]))


def test_edges_there_and_back() -> None:
    W = random_graph(2, 3, 5)
    assert torch.equal(from_upper_triangle(upper_triangle(W), 5), W)
    with pytest.raises(ValueError, match="10 edges"):
        from_upper_triangle(torch.ones(9), 5)


def test_laplacian_and_distances_are_adjoint() -> None:
    W, X = random_graph(4, 6), torch.randn(4, 6, 9, dtype=torch.float64)
    G = gram(X)
    left = (laplacian(W) * G).sum((-1, -2))
    right = (upper_triangle(W) * upper_triangle(distances_from_gram(G))).sum(-1)
    torch.testing.assert_close(left, right)


def test_degrees_and_their_adjoint() -> None:
    W, lam = random_graph(4, 6), torch.randn(4, 6, dtype=torch.float64)
    left = (degrees(W) * lam).sum(-1)
    right = (upper_triangle(W) * upper_triangle(degrees_adjoint(lam))).sum(-1)
    torch.testing.assert_close(left, right)


def test_normalized_adjacency_leaves_isolated_nodes_at_zero() -> None:
    W = torch.zeros(3, 3, dtype=torch.float64)
    W[0, 1] = W[1, 0] = 4
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 1] = expected[1, 0] = 1
    torch.testing.assert_close(normalized_adjacency(W), expected)

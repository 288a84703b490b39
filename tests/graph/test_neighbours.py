"""The density that is asked for: on planted graphs, at any size and scale, and the prox behind it."""

import numpy as np
import pytest
import torch

from jgesr_lightning.graph import learn_graph, pairwise_sq_distances


def planted(nodes: int, size: int, scale: float, seed: int = 0) -> torch.Tensor:
    """Models that vary smoothly over a graph of points in the plane, and noise."""
    rng = np.random.default_rng(seed)
    places = rng.uniform(size=(nodes, 2))
    apart = np.square(places[:, None] - places[None]).sum(-1)
    W = np.exp(-apart * nodes) - np.eye(nodes)
    smooth = np.linalg.inv(np.eye(nodes) + 5 * (np.diag(W.sum(1)) - W))
    X = smooth @ rng.normal(size=(nodes, size)) + 0.05 * rng.normal(size=(nodes, size))
    return torch.from_numpy(scale * X)


@pytest.mark.parametrize("neighbours", [2, 3, 5, 8])
@pytest.mark.parametrize(("nodes", "size"), [(10, 10), (20, 1000), (20, 100_000), (60, 300), (200, 30)])
def test_a_node_has_about_as_many_edges_as_asked_for(neighbours: int, nodes: int, size: int) -> None:
    for scale in (1.0,) if nodes * size > 10**6 else (1e-3, 1.0, 1e3):
        W = learn_graph(pairwise_sq_distances(planted(nodes, size, scale)), 1.0, 1.0, 1.0, neighbours=neighbours)
        assert abs(float((W > 0).sum()) / nodes - neighbours) < 1


def test_the_graph_does_not_depend_on_the_scale_and_grows_with_the_root_of_beta() -> None:
    D = pairwise_sq_distances(planted(20, 300, 1.0))
    W = learn_graph(D, 1.0, 1.0, 1.0, neighbours=4)
    torch.testing.assert_close(learn_graph(1e6 * D, 0.3, 1.0, 7.0, neighbours=4), W, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(learn_graph(D, 1.0, 4.0, 1.0, neighbours=4), 2 * W)


@pytest.mark.parametrize("neighbours", [0, 20, 50])
def test_more_neighbours_than_there_are_is_refused(neighbours: int) -> None:
    with pytest.raises(ValueError, match=f"neighbours is {neighbours}; it must be from 1 to 19"):
        learn_graph(pairwise_sq_distances(planted(20, 30, 1.0)), 1.0, 1.0, 1.0, neighbours=neighbours)


def test_equal_nodes_have_some_graph() -> None:
    W = learn_graph(torch.zeros(5, 5), 1.0, 1.0, 1.0, neighbours=2)
    assert bool(torch.isfinite(W).all()) and float(W.sum(1).min()) > 0


@pytest.mark.parametrize(("neighbours", "equal"), [(1, 1), (1, 4), (2, 3), (2, 8), (3, 20)])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_edges_weigh_something_where_a_scale_can_be_as_large_as_one_likes(
    neighbours: int, equal: int, scale: float
) -> None:
    X = planted(24, 300, scale)
    X[:equal] = X[0]
    W = learn_graph(pairwise_sq_distances(X), 1.0, 1.0, 1.0, neighbours=neighbours)
    degrees = W[equal:].sum(1)  # of those that have nobody equal: it was 1e-8 and less
    assert float(degrees.min()) > 1e-3 and float(degrees.max()) > 0.2


def test_two_nodes_have_one_edge_whose_weight_does_not_depend_on_the_scale() -> None:
    D = torch.tensor([[0.0, 3.0], [3.0, 0.0]], dtype=torch.float64)
    expected = torch.ones(2, 2, dtype=torch.float64) - torch.eye(2)  # 2 / w = 1 + w
    for scale in (1e-6, 1.0, 1e6):
        torch.testing.assert_close(learn_graph(scale * D, 1.0, 1.0, 1.0, neighbours=1), expected)

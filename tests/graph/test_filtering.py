"""Graph filtering: the closed form, its limits, and the systems of columns with gaps."""

import math

import pytest
import torch

from jgesr_lightning.graph import filter_signals, gradient_signals, laplacian
from tests.graph.algebra import from_upper_triangle, normalized_adjacency


def instance(nodes: int = 6, size: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(nodes, size, dtype=torch.float64, generator=generator)
    W = from_upper_triangle(torch.rand(nodes * (nodes - 1) // 2, dtype=torch.float64, generator=generator), nodes)
    z = torch.rand(nodes, dtype=torch.float64, generator=generator) + 0.05
    return X, W, z


def test_closed_form() -> None:
    X, W, z = instance()
    alpha, mu = 0.7, 1.9
    expected = torch.linalg.solve(torch.diag(z) + 2 * alpha / mu * laplacian(W), torch.diag(z) @ X)
    torch.testing.assert_close(filter_signals(X, W, z, alpha, mu), expected)
    torch.testing.assert_close(filter_signals(X.float(), W, z, alpha, mu), expected.float())


def test_is_the_minimiser_for_a_fixed_graph() -> None:
    X, W, z = instance()
    psi = filter_signals(X, W, z, 0.7, 1.9)
    assert float(gradient_signals(psi, W, X, z, None, 0.7, 1.9).abs().max()) < 1e-12


def test_a_strong_graph_in_blocks_gives_the_weighted_means_of_its_clusters() -> None:
    X, W, z = instance()
    W[:2, 2:] = W[2:, :2] = 0
    psi = filter_signals(X, W, z, 1e6, 1.0)
    for block in (slice(0, 2), slice(2, 6)):
        mean = (z[block] / z[block].sum()) @ X[block]
        torch.testing.assert_close(psi[block], mean.expand_as(psi[block]), rtol=1e-5, atol=1e-5)


def test_one_hop_filter_to_first_order() -> None:
    X, W, _ = instance()
    A = normalized_adjacency(W)
    normalised = torch.eye(6, dtype=torch.float64) - A
    ones = torch.ones(6, dtype=torch.float64)
    # I - L_norm = D^-1/2 W D^-1/2 is the first-order expansion of (I + L_norm)^-1, the filter at 2 alpha = mu. Scaling
    # the Laplacian by t leaves an error of second order in t.
    errors = []
    for t in (1e-2, 1e-3):
        full = torch.linalg.solve(torch.eye(6, dtype=torch.float64) + t * normalised, X)
        one_hop = (1 - t) * X + t * (A @ X)
        errors.append(float((full - one_hop).norm()))
    assert errors[1] < errors[0] / 90
    regular = from_upper_triangle(
        torch.full((15,), 0.2, dtype=torch.float64), 6
    )  # degrees one: L is its normalised form
    small = regular * 1e-4
    filtered = filter_signals(X, small, ones, 0.5, 1.0)
    torch.testing.assert_close(filtered, X - laplacian(small) @ X, rtol=0, atol=1e-6)
    torch.testing.assert_close(normalized_adjacency(regular), regular)


@pytest.mark.parametrize("missing", [0.0, 0.1, 0.6])
def test_gaps_are_solved_column_by_column(missing: float) -> None:
    X, W, z = instance()
    mask = torch.rand(X.shape, generator=torch.Generator().manual_seed(1)) >= missing
    mask[0] = True
    psi = filter_signals(torch.where(mask, X, torch.nan), W, z, 0.7, 1.9, mask=mask)
    for j in range(X.shape[1]):
        m = mask[:, j].double()
        column = torch.linalg.solve(torch.diag(m * z) + 1.4 / 1.9 * laplacian(W), m * z * X[:, j])
        torch.testing.assert_close(psi[:, j], column, rtol=1e-9, atol=1e-11)


def test_a_column_nobody_delivered_stays_finite_and_follows_the_start() -> None:
    X, W, z = instance()
    mask = torch.ones_like(X, dtype=torch.bool)
    mask[:, 3] = False
    start = torch.full_like(X, 5.0)
    psi = filter_signals(X, W, z, 0.7, 1.9, mask=mask, start=start)
    torch.testing.assert_close(psi[:, 3], start[:, 3])
    assert bool(torch.isfinite(psi).all())


def test_batch_equals_loop() -> None:
    X, W, z = torch.randn(3, 4, 9), from_upper_triangle(torch.rand(3, 6, dtype=torch.float64), 4), torch.rand(4) + 0.1
    together = filter_signals(X, W, z, 0.3, 1.0)
    for i in range(3):
        torch.testing.assert_close(together[i], filter_signals(X[i], W[i], z, 0.3, 1.0))


@pytest.mark.parametrize("bridge", [0.0, 1e-12, 1e-6, 1e-3])
def test_a_part_of_the_graph_that_delivered_nothing_is_filled_over_the_edges_it_has(bridge: float) -> None:
    """Nodes 0 and 1 hang together, and by a weak edge or none to 2 and 3, which deliver everything."""
    W = torch.zeros(4, 4, dtype=torch.float64)
    for m, n, weight in ((0, 1, 1.0), (2, 3, 1.0), (1, 2, bridge)):
        W[m, n] = W[n, m] = weight
    X = torch.randn(4, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 200, dtype=torch.bool)
    mask[:2, :120] = False
    mask[:, 100:120] = False
    mask[0, 120:] = False
    start = X + 1
    Psi = filter_signals(X, W, torch.ones(4, dtype=torch.float64), 0.5, 1.0, mask=mask, start=start)
    assert bool(torch.isfinite(Psi).all())
    L = torch.diag(W.sum(1)) - W
    left = mask * (Psi - torch.where(mask, X, 0)) + L @ Psi
    assert float(left.abs().max()) < 1e-12
    if bridge == 0:  # not determined: what the start has of it, the mean, stays
        torch.testing.assert_close(Psi[:2, :100], start[:2, :100].mean(0).expand(2, -1))
    elif bridge >= 1e-6:
        torch.testing.assert_close(Psi[1, :100], Psi[2, :100], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(Psi[0, 120:], Psi[1, 120:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": [[1.0, 2.0]]}, "X must be a torch.Tensor; got list"),
        ({"X": torch.ones(3, 5, dtype=torch.int64)}, "X must be a .* floating-point tensor; got torch.int64"),
        ({"W": torch.zeros(4, 4)}, r"W must have shape \(..., 3, 3\); got \(4, 4\)"),
        ({"weights": torch.ones(4)}, r"weights must have shape \(..., 3\); got \(4,\)"),
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, "mask must have shape"),
        ({"mask": torch.ones(3, 5)}, "mask must be of type bool"),
        ({"weights": torch.arange(3)}, "weights must be positive and finite"),
        ({"weights": torch.tensor([1.0, -1.0, 1.0])}, "weights must be positive and finite"),
        ({"alpha": math.inf}, "alpha must be non-negative and mu positive, both finite; got inf, 1.0"),
        ({"mu": 0.0}, "alpha must be non-negative and mu positive, both finite; got 1.0, 0.0"),
    ],
)
def test_wrong_arguments_are_named(change, message) -> None:
    given = {"X": torch.ones(3, 5), "W": torch.ones(3, 3), "weights": torch.ones(3), "alpha": 1.0, "mu": 1.0}
    with pytest.raises(ValueError, match=message):
        filter_signals(**(given | change))

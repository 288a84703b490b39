"""Gram matrices and what is read from them, against the plain formulas."""

import numpy as np
import pytest
import torch

from jgesr_lightning.graph import cosine_from_gram, distances_from_gram, gram, pairwise_sq_distances
from jgesr_lightning.graph.gram import with_shared


def plain_distances(X: torch.Tensor) -> torch.Tensor:
    X = X.double()
    return (X[..., :, None, :] - X[..., None, :, :]).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 300_000), (2, 3, 4, 77), (3, 0), (2, 1)])
def test_gram_is_the_product_in_double_precision(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    X = torch.randn(shape).to(dtype)
    G = gram(X)
    assert G.dtype == torch.float64
    assert torch.equal(G, G.mT)
    terms = 1 + X.shape[-1]  # of each sum; where they cancel, their size is what the rounding goes by
    torch.testing.assert_close(G, X.double() @ X.double().mT, rtol=1e-12, atol=1e-15 * terms)


def test_gram_of_masked_differences_reads_nothing_behind_the_mask() -> None:
    X, R = torch.randn(4, 300_000), torch.randn(300_000)
    mask = torch.rand(4, 300_000) > 0.3
    X = torch.where(mask, X, torch.nan)
    expected = torch.where(mask, X.double() - R.double(), 0)
    torch.testing.assert_close(gram(X, minus=R, mask=mask), expected @ expected.T)
    both = gram(X, minus=R.expand(4, -1), mask=mask)
    torch.testing.assert_close(both, expected @ expected.T)
    centred = X.nan_to_num().double()
    for mean in (X.nan_to_num().mean(1, keepdim=True), torch.tensor(0.5)):  # whatever broadcasts
        torch.testing.assert_close(gram(X.nan_to_num(), minus=mean), (centred - mean) @ (centred - mean).T)


def test_gram_takes_matrices_that_are_not_contiguous() -> None:
    X = torch.randn(300, 4).T
    torch.testing.assert_close(gram(X), X.double() @ X.double().T)


def test_distances_keep_their_digits_when_rows_share_a_large_part() -> None:
    small = 1e-6 * torch.randn(5, 2000, dtype=torch.float64)
    shared = 1e4 * torch.randn(2000, dtype=torch.float64)
    D = pairwise_sq_distances(shared + small)
    exact = plain_distances((shared + small) - shared)  # the subtraction is exact
    torch.testing.assert_close(D, exact, rtol=1e-9, atol=0)


def test_distances_are_symmetric_with_zero_diagonal_and_zero_between_equal_rows() -> None:
    X = torch.randn(3, 6, 50)
    X[:, 4] = X[:, 2]
    D = pairwise_sq_distances(X)
    assert torch.equal(D, D.mT)
    assert bool((D.diagonal(dim1=-2, dim2=-1) == 0).all())
    assert float(D[:, 2, 4].abs().max()) < 1e-12
    torch.testing.assert_close(D, plain_distances(X), rtol=1e-6, atol=1e-6)


def test_what_was_taken_out_of_all_rows_is_put_back() -> None:
    Y = torch.randn(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shared = Y[:, :1] + 0.5
    augmented = torch.cat([Y - shared, shared], 1)
    torch.testing.assert_close(with_shared(augmented @ augmented.mT), Y @ Y.mT)


def test_what_is_made_of_a_product_is_symmetric_where_the_product_is_not() -> None:
    rows = torch.randn(7, 90, dtype=torch.float64)
    G = (rows @ rows.T).numpy() * (1 + 1e-15 * np.random.default_rng(0).integers(-3, 4, (7, 7)))  # as some processors
    for found in (cosine_from_gram(G), distances_from_gram(G)):
        assert np.array_equal(found, found.T)


def test_cosines_of_a_zero_row_are_zero() -> None:
    X = torch.tensor([[3.0, 0.0], [0.0, 0.0], [-2.0, 0.0], [1.0, 1.0]])
    cosines = cosine_from_gram(gram(X))
    half = 0.5**0.5
    expected = [[1, 0, -1, half], [0, 0, 0, 0], [-1, 0, 1, -half], [half, 0, -half, 1]]
    torch.testing.assert_close(cosines, torch.tensor(expected, dtype=torch.float64))


def test_distances_from_a_gram_matrix_that_rounding_left_inconsistent_are_not_negative() -> None:
    G = torch.tensor([[1.0, 1.0 + 1e-15], [1.0 + 1e-15, 1.0]], dtype=torch.float64)
    assert float(distances_from_gram(G).min()) == 0


def test_gram_refuses_integers() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        gram(torch.ones(2, 3, dtype=torch.int64))

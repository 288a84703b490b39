"""Distances and cosines of models whose squares overflow, and of models shared out over processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jgesr_lightning.aggregators.base import no_reduce
from jgesr_lightning.aggregators.geometry import cosines, reduced_gram, sq_distances
from tests.aggregators.sharding import SharedSum


def models(seed=0):
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("size", [1.0, 1e150, 1e160, 1e305, 1e-160, 1e-300])
def test_scaled_gram_is_the_gram(size):
    found, scale = reduced_gram(models() * size, no_reduce)
    torch.testing.assert_close(found * (scale / size) ** 2, models() @ models().T)


@pytest.mark.parametrize("size", [1.0, 1e160, 1e305, 1e-170])
def test_cosines_do_not_depend_on_the_scale(size):
    centre = models(1)[0]
    expected = torch.nn.functional.cosine_similarity((models() - centre)[:, None], (models() - centre)[None], dim=-1)
    torch.testing.assert_close(cosines(models() * size, no_reduce, minus=centre * size), expected)


def test_zero_vectors_have_no_direction():
    some = models()
    some[2] = 0
    found = cosines(some, no_reduce)
    assert (found[2] == 0).all() and (found[:, 2] == 0).all()
    assert found.diagonal().tolist() == [1, 1, 0, 1]
    assert (cosines(torch.zeros(3, 5), no_reduce) == 0).all()


def test_difference_of_finite_models_that_overflows():
    far = torch.tensor([[1.5e308, 0.0], [-1.5e308, 0.0]], dtype=torch.float64)
    found = sq_distances(far, no_reduce)
    assert found.diagonal().tolist() == [0, 0] and found[0, 1] == 1e300
    torch.testing.assert_close(cosines(far, no_reduce), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_named(value):
    broken = models()
    broken[1, 2] = value
    with pytest.raises(ValueError, match="received holds values that are not finite"):
        sq_distances(broken, no_reduce)


def test_distances():
    torch.testing.assert_close(
        sq_distances(models().float(), no_reduce), torch.cdist(models(), models()) ** 2, rtol=1e-5, atol=1e-6
    )


def test_processes_of_different_scale_agree_on_one():
    some = models()
    some[:, :5] *= 1e160
    some[:, 5:] *= 1e175
    shared = SharedSum(2)
    with ThreadPoolExecutor(2) as pool:
        parts = [
            pool.submit(reduced_gram, some[:, columns], shared.of(rank))
            for rank, columns in enumerate((slice(0, 5), slice(5, None)))
        ]
        (first, first_scale), (second, second_scale) = (part.result() for part in parts)
    assert first_scale == second_scale and torch.equal(first, second)
    whole, scale = reduced_gram(some, no_reduce)
    torch.testing.assert_close(first * (first_scale / scale) ** 2, whole)

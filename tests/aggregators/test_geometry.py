"""Distances and cosines, of models whose squares overflow, too."""

import pytest
import torch

from jgesr_lightning.aggregators.base import no_reduce
from jgesr_lightning.aggregators.geometry import cosines, sq_distances


def models(seed=0):
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("size", [1.0, 1e30, 1e150, 1e-150])
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


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e160])
def test_what_has_no_finite_square_is_named(value):
    broken = models()
    broken[1, 2] = value
    for measure in (sq_distances, cosines):
        with pytest.raises(ValueError, match="received holds values that are not finite, or whose squares are not"):
            measure(broken, no_reduce)


def test_distances():
    torch.testing.assert_close(
        sq_distances(models().float(), no_reduce), torch.cdist(models(), models()) ** 2, rtol=1e-5, atol=1e-6
    )

import math

import pytest
from scipy import stats

from jgesr_lightning.reporting.statistics import mean_of, paired, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 5, 9, 29, 30, 31, 40, 99, 1000])
def test_quantile_agrees_with_scipy(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=2e-6)


def test_quantile_needs_a_degree_of_freedom():
    with pytest.raises(ValueError, match="at least 1"):
        t_quantile(0)


def test_mean_and_sample_deviation():
    assert mean_of([1.0, 2.0, 3.0]).mean == 2.0
    assert mean_of([1.0, 2.0, 3.0]).std == 1.0
    assert mean_of([4.0]).std is None


def test_paired_uses_the_shared_seeds_and_scipys_interval():
    first, second = {0: 5.0, 1: 7.0, 2: 6.0, 9: 100.0}, {0: 4.0, 1: 5.0, 2: 5.5, 8: -100.0}
    found = paired(first, second)
    low, high = stats.ttest_rel([5, 7, 6], [4, 5, 5.5]).confidence_interval(0.95)
    assert found.n == 3
    assert found.mean - found.half_width == pytest.approx(low, abs=1e-6)
    assert found.mean + found.half_width == pytest.approx(high, abs=1e-6)
    assert not found.clear
    assert low < 0 < high


def test_paired_with_one_or_no_shared_seed():
    assert paired({0: 1.0}, {0: 0.5}).half_width is None
    assert not paired({0: 1.0}, {0: 0.5}).clear
    assert paired({0: 1.0}, {1: 0.5}) is None


def test_a_difference_clear_of_zero():
    found = paired({0: 2.0, 1: 2.1, 2: 1.9}, {0: 1.0, 1: 1.1, 2: 0.91})
    assert found.clear
    assert math.isclose(found.mean, 0.99666, abs_tol=1e-4)

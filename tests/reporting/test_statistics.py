import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jgesr_lightning.reporting.statistics import Difference, corrected, mean_of, paired, t_quantile


@pytest.mark.parametrize(("degrees", "probability"), [(1, 0.975), (2, 0.99), (9, 0.9975), (29, 0.975), (1000, 0.999)])
def test_quantile_agrees_with_scipys_distribution(degrees, probability):
    assert t_quantile(degrees, probability) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-9)


def test_quantile_from_a_printed_table():
    # 97.5 %, as printed in any statistics book
    assert [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 9, 30)] == [12.706, 4.303, 2.776, 2.262, 2.042]


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
    test = stats.ttest_rel([5, 7, 6], [4, 5, 5.5])
    low, high = test.confidence_interval(0.95)
    assert found.n == 3
    assert found.mean - found.half_width == pytest.approx(low, abs=1e-6)
    assert found.mean + found.half_width == pytest.approx(high, abs=1e-6)
    assert found.p == pytest.approx(test.pvalue, rel=1e-9)
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


def test_differences_that_do_not_vary():
    alike = paired({0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0})
    assert (alike.p, alike.half_width, alike.clear) == (1.0, 0.0, False)
    for first, second in (
        ({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}),
        ({0: 92.0, 1: 91.1}, {0: 90.3, 1: 89.4}),  # 1.7000000000000028 and 1.6999999999999886
    ):
        found = paired(first, second)  # two seeds of a coarse accuracy: no certainty
        assert (found.error, found.p, found.half_width, found.clear) == (0.0, None, None, False)
        assert not corrected({"a": found})["a"].clear_of_all
    level = paired({0: 0.3, 1: 0.6}, {0: 0.1 + 0.2, 1: 0.6})
    assert (level.mean, level.p) == (0.0, 1.0)
    assert paired({0: 3e-8, 1: 5e-8}, {0: 1e-8, 1: 2e-8}).error > 0  # small is not rounding


def holm_by_closure(values, level=0.05):
    """Return what the closed test rejects that tests every intersection by Bonferroni: Holm's procedure."""
    count = len(values)
    sets = [[k for k in range(count) if code >> k & 1] for code in range(1, 2**count)]
    rejected = {tuple(members) for members in sets if min(values[k] for k in members) <= level / len(members)}
    return [all(tuple(members) in rejected for members in sets if k in members) for k in range(count)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=6), st.integers(2, 12))
def test_corrected_intervals_leave_out_zero_where_the_closed_test_rejects(means, seeds):
    family = {k: Difference(mean, 1.0, seeds) for k, mean in enumerate(means)}
    found = corrected(family)
    assert [found[k].clear_of_all for k in range(len(means))] == holm_by_closure([family[k].p for k in family])
    assert all(found[k].holm_half_width >= found[k].half_width * (1 - 1e-12) for k in found)


def test_holms_levels_by_hand():
    # five seeds: t quantiles with 4 degrees of freedom at 0.05/3, 0.05/2, then the last rejected or not
    family = {"a": Difference(9.0, 1.0, 5), "b": Difference(3.4, 1.0, 5), "c": Difference(1.0, 1.0, 5)}
    found = corrected(family)
    p = {key: one.p for key, one in family.items()}
    assert p["a"] < 0.05 / 3 and 0.025 < p["b"] < 0.05  # b alone is clear, among three it is not
    assert found["a"].holm_half_width == pytest.approx(stats.t.ppf(1 - 0.05 / 6, 4))
    assert found["b"].holm_half_width == found["c"].holm_half_width == pytest.approx(stats.t.ppf(1 - 0.05 / 4, 4))
    assert [found[key].clear_of_all for key in "abc"] == [True, False, False]
    assert family["b"].clear


def test_single_seeds_do_not_count_in_the_family():
    found = corrected({"a": Difference(3.0, 1.0, 5), "b": Difference(3.0, None, 1)})
    assert found["a"].holm_level == 0.05
    assert found["b"].holm_half_width is None and not found["b"].clear_of_all


def test_the_corrected_family_wrongly_leaves_out_zero_in_one_of_twenty():
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(1000):
        draws = generator.normal(size=(8, 5))
        family = {k: Difference(float(row.mean()), float(row.std(ddof=1) / 5**0.5), 5) for k, row in enumerate(draws)}
        wrong += any(one.clear_of_all for one in corrected(family).values())
    assert 0.03 < wrong / 1000 < 0.07

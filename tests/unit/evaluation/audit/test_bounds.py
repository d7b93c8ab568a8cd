"""Clopper-Pearson bounds against SciPy and by hand, and the calibration error that chance alone gives."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from cdc_plugin.evaluation.audit.bounds import (
    accuracy_at_least,
    accuracy_interval,
    bins_for,
    calibration_error_by_chance,
)


@pytest.mark.parametrize(("right", "answered"), [(0, 1), (1, 1), (0, 30), (30, 30), (7, 10), (95, 100), (500, 1000)])
def test_bounds_equal_those_of_scipy(right, answered):
    both = binomtest(right, answered).proportion_ci(0.95, method="exact")
    assert accuracy_interval(right, answered) == pytest.approx((both.low, both.high), abs=1e-9)
    one = binomtest(right, answered, alternative="greater").proportion_ci(0.95, method="exact")
    assert accuracy_at_least(right, answered) == pytest.approx(one.low, abs=1e-9)


def test_bounds_that_can_be_worked_by_hand():
    # All of n right: p^n = 0.05 is the one-sided bound; none right: (1 - p)^n = 0.025 is the upper one.
    assert accuracy_at_least(20, 20) == pytest.approx(0.05 ** (1 / 20))
    assert accuracy_interval(0, 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))


def test_right_and_wrong_are_mirror_images():
    low, high = accuracy_interval(13, 40)
    assert accuracy_interval(27, 40) == pytest.approx((1 - high, 1 - low))


def test_more_certainty_gives_a_wider_interval():
    low, high = accuracy_interval(13, 40, 0.99)
    assert (low, high)[0] < accuracy_interval(13, 40)[0]
    assert high > accuracy_interval(13, 40)[1]


def test_bins_grow_with_the_answers():
    assert [bins_for(answered) for answered in (1, 9, 19, 20, 99, 150, 1000)] == [1, 1, 1, 2, 9, 15, 15]


def test_chance_gives_the_mean_absolute_deviation_of_a_binomial():
    # One bin of 10 answers at confidence 0.5: E|X / 10 - 0.5| = 0.1230.
    assert calibration_error_by_chance(np.full(10, 0.5), 1) == pytest.approx(0.1230, abs=0.012)


def test_chance_gives_less_with_more_answers_and_nothing_where_all_is_certain():
    few, many = (calibration_error_by_chance(np.linspace(0.4, 1, count), 10) for count in (100, 1000))
    assert 0 < many < few / 2
    assert calibration_error_by_chance(np.ones(50), 5) == 0

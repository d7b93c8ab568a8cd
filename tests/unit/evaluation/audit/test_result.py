"""Clopper-Pearson bounds worked by hand, and the calibration error that chance alone gives."""

from __future__ import annotations

import numpy as np
import pytest

from cdc_plugin.evaluation.audit.read import (
    choose_bin_count,
    compute_accuracy_bound,
    compute_accuracy_interval,
    simulate_calibration_error,
)


def test_bounds_that_can_be_worked_by_hand():
    # All of n right: p^n = 0.05 is the one-sided bound; none right: (1 - p)^n = 0.025 is the upper one.
    assert compute_accuracy_bound(20, 20) == pytest.approx(0.05 ** (1 / 20))
    assert compute_accuracy_interval(0, 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))


def test_right_and_wrong_are_mirror_images():
    low, high = compute_accuracy_interval(13, 40)
    assert compute_accuracy_interval(27, 40) == pytest.approx((1 - high, 1 - low))
    wider_low, wider_high = compute_accuracy_interval(13, 40, certainty=0.99)
    assert wider_low < low < high < wider_high


def test_bins_grow_with_the_answers():
    assert [choose_bin_count(answered) for answered in (1, 9, 19, 20, 99, 150, 1000)] == [1, 1, 1, 2, 9, 15, 15]


def test_chance_gives_the_mean_absolute_deviation_of_a_binomial():
    # One bin of 10 answers at confidence 0.5: E|X / 10 - 0.5| = 0.1230.
    assert simulate_calibration_error(np.full(10, 0.5), 1) == pytest.approx(0.1230, abs=0.012)


def test_chance_gives_less_with_more_answers_and_nothing_where_all_is_certain():
    few, many = (simulate_calibration_error(np.linspace(0.4, 1, count), 10) for count in (100, 1000))
    assert 0 < many < few / 2
    assert simulate_calibration_error(np.ones(50), 5) == 0

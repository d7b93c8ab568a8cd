from fractions import Fraction

import numpy as np
import pytest

from cdc_plugin.metrics.confidence import accept_above, accept_to_target


def by_brute_force(confidence: np.ndarray, target: float) -> set[int]:
    """Try every possible threshold, in exact fractions of millionths; the lowest whose images reach the target."""
    exact = [Fraction(round(float(value) * 10**6), 10**6) for value in confidence]
    best: set[int] = set()
    for threshold in exact:
        chosen = {place for place, value in enumerate(exact) if value >= threshold}
        mean = sum(exact[place] for place in chosen) / len(chosen)
        if mean >= Fraction(round(target * 10**6), 10**6) and len(chosen) > len(best):
            best = chosen
    return best


def test_the_largest_set_that_reaches_the_target_by_hand():
    found = accept_to_target(np.array([0.6, 1.0, 0.5, 0.9]), 0.8)
    # Running means of 1, .9, .6, .5: 1, .95, .8333, .75
    assert found.mask.tolist() == [True, True, False, True]
    assert found.threshold == 0.6
    assert found.expected_accuracy == pytest.approx(2.5 / 3)
    assert (found.count, found.coverage) == (3, 0.75)
    assert accept_above(np.array([0.95, 0.9, 0.89, 0.1]), 0.9).expected_accuracy == pytest.approx(0.925)


def test_equally_sure_images_at_the_border_are_left_together_where_not_all_of_them_fit():
    # With one of the two .8 the mean would be .9, with both it is .8667.
    found = accept_to_target(np.array([0.8, 1.0, 0.8]), 0.9)
    assert found.mask.tolist() == [False, True, False]
    assert accept_to_target(np.array([0.8, 1.0, 0.8]), 0.86).mask.all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("share", [0.1, 0.7, 0.9, 0.95, 1.0])
def test_a_mean_that_is_the_target_exactly_reaches_it_however_numbers_are_rounded(dtype, share):
    confidence = np.full(1001, share, dtype=dtype)  # in float32, .9 is a little less than .9
    assert accept_to_target(confidence, share).mask.all()
    assert accept_above(confidence, share).mask.all()
    assert accept_to_target(confidence, share).expected_accuracy == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("accept", [accept_above, accept_to_target])
@pytest.mark.parametrize("confidence", [[0.5, 0.94], []])
def test_nothing_is_accepted_where_even_the_surest_is_below_or_there_is_none(accept, confidence):
    found = accept(np.array(confidence), 0.95)
    assert not found.mask.any()
    assert (found.count, found.threshold, found.expected_accuracy, found.coverage) == (0, None, None, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_trying_every_threshold(seed):
    random = np.random.default_rng(seed)
    confidence = random.beta(4, 1, 40).round(int(random.integers(1, 6)))  # few decimals make many ties
    for target in (0.3, 0.75, 0.9, 0.99, 1.0):
        found = accept_to_target(confidence, target)
        assert set(np.flatnonzero(found.mask)) == by_brute_force(confidence, target)
        if found.count:
            assert found.expected_accuracy >= target
            np.testing.assert_array_equal(accept_above(confidence, found.threshold).mask, found.mask)


@pytest.mark.parametrize("accept", [accept_above, accept_to_target])
@pytest.mark.parametrize(
    ("confidence", "share"),
    [([0.5], 0.0), ([0.5], 1.01), ([0.5], float("nan")), ([float("nan")], 0.5), ([-0.1], 0.5), ([1.1], 0.5)],
)
def test_what_is_no_share_is_refused(accept, confidence, share):
    with pytest.raises(ValueError, match="expected"):
        accept(np.array(confidence), share)

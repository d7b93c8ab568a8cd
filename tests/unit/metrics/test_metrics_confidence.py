import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import expected_calibration_error, mean_confidence, summary


def test_calibration_error_by_hand():
    # Bins of width 0.5: {0.2 wrong, 0.4 right} and {0.8 right, 1.0 wrong}.
    error = expected_calibration_error([0.2, 0.4, 0.8, 1.0], [0, 1, 1, 0], bins=2)
    assert error == pytest.approx((abs(0.5 - 0.3) * 2 + abs(0.5 - 0.9) * 2) / 4)


def test_upper_edge_belongs_to_the_lower_bin():
    # 0.5 shares a bin with 0.25: accuracy 1/2 against confidence 0.375; alone they miss by 0.75 and 0.5.
    assert expected_calibration_error([0.25, 0.5], [1, 0], bins=2) == pytest.approx(0.125)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_agrees_with_torchmetrics(bins):
    rng = np.random.default_rng(bins)
    confidence = rng.beta(5, 2, 3000)
    correct = rng.random(3000) < confidence**2
    oracle = binary_calibration_error(
        torch.from_numpy(confidence), torch.from_numpy(correct).long(), n_bins=bins, norm="l1"
    )
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(float(oracle), abs=1e-6)


def test_order_of_samples_does_not_matter():
    rng = np.random.default_rng(0)
    confidence, correct = rng.random(500), rng.random(500) < 0.5
    order = rng.permutation(500)
    error = expected_calibration_error(confidence, correct)
    assert expected_calibration_error(confidence[order], correct[order]) == pytest.approx(error)


@pytest.mark.parametrize(("right", "error"), [(1, 0.0), (0, 1.0)])
def test_full_confidence_is_as_wrong_as_the_predictions(right, error):
    assert expected_calibration_error(np.ones(7), np.full(7, right)) == pytest.approx(error)


def test_one_sample_is_enough():
    assert expected_calibration_error([0.7], [1]) == pytest.approx(0.3)
    assert mean_confidence([0.7]) == pytest.approx(0.7)


def test_summary_by_hand():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    scores = summary(probs, [1, 1, 0, 0])
    assert set(scores) == {"ACC", "NMI", "ARI", "ECE", "CONF"}
    assert scores["ACC"] == pytest.approx(0.75)
    assert scores["CONF"] == pytest.approx(0.75)
    assert scores["ECE"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.6) / 4)  # every sample in a bin of its own
    assert all(type(value) is float for value in scores.values())


def test_summary_takes_float16_and_torch_tensors():
    probs = torch.softmax(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 9, dim=1)
    labels = torch.arange(50) % 4
    exact = summary(probs, labels)
    assert summary(probs.half().numpy(), labels.numpy())["CONF"] == pytest.approx(exact["CONF"], abs=1e-3)


@pytest.mark.parametrize("probs", [np.ones((1, 1)), np.eye(3), np.full((4, 5), 0.2)])
def test_degenerate_probabilities_give_no_nan(probs):
    assert np.isfinite(list(summary(probs, np.zeros(len(probs), dtype=int)).values())).all()


def test_bad_input_is_refused_in_words():
    with pytest.raises(UserError, match="softmax"):
        expected_calibration_error([0.2, 3.0], [1, 0])
    with pytest.raises(UserError, match="found nan"):
        mean_confidence([0.2, float("nan")])
    with pytest.raises(UserError, match="same samples"):
        expected_calibration_error([0.2, 0.3], [1])
    with pytest.raises(UserError, match="bins=0"):
        expected_calibration_error([0.2], [1], bins=0)
    with pytest.raises(UserError, match="samples, clusters"):
        summary(np.ones(4), np.ones(4, dtype=int))

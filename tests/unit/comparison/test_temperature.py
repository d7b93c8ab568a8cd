import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from cdc_plugin.comparison.temperature import LARGEST, SMALLEST, fit_temperature, scaled
from cdc_plugin.errors import UserError


def drawn(samples: int = 4000, clusters: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels that were drawn from just their probabilities: T is 1 but for chance."""
    randomness = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, clusters, generator=randomness, dtype=torch.float64)
    return logits, torch.multinomial(F.softmax(logits, dim=1), 1, generator=randomness).squeeze(1)


def by_scipy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    def loss(log_temperature: float) -> float:
        return F.cross_entropy(logits / math.exp(log_temperature), labels).item()

    return math.exp(minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9}).x)


def test_scaled_by_hand():
    # Logits 2 log 3 and 0 at T = 2 are log 3 and 0: probabilities 3/4 and 1/4.
    assert scaled(torch.tensor([[2 * math.log(3), 0.0]]), 2.0).tolist() == [pytest.approx([0.75, 0.25])]


def test_logarithms_of_probabilities_do_as_logits():
    logits, _ = drawn(10)
    assert torch.allclose(scaled(F.log_softmax(logits, dim=1), 3.0), scaled(logits, 3.0))


def test_the_temperature_by_hand():
    # Four samples sure at 9 : 1 (logit 2 log 3), three of them right: best is 3 : 1 = 9^(1/2), thus T = 2.
    logits = torch.tensor([[math.log(9), 0.0]] * 4)
    assert fit_temperature(logits, torch.tensor([0, 0, 1, 0])) == pytest.approx(2.0, rel=1e-6)


def test_a_label_without_a_column_counts_as_an_even_target_by_hand():
    # One right and one even sample want a mean of 3/4 for the first column: again T = 2.
    logits = torch.tensor([[math.log(9), 0.0]] * 2)
    for nowhere in (2, 7, -1):
        assert fit_temperature(logits, torch.tensor([0, nowhere])) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("factor", [0.2, 1.0, 15.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_temperature_is_that_of_a_general_search(factor, seed):
    logits, labels = drawn(300, seed=seed)
    assert fit_temperature(factor * logits, labels) == pytest.approx(by_scipy(factor * logits, labels), rel=1e-5)


def test_overconfident_logits_are_brought_back():
    logits, labels = drawn()
    assert fit_temperature(logits, labels) == pytest.approx(1.0, abs=0.05)
    assert fit_temperature(5 * logits, labels) == pytest.approx(5.0, abs=0.25)


def test_the_temperature_grows_with_the_logits_and_takes_no_notice_of_shifts_or_order():
    logits, labels = drawn(200)
    temperature = fit_temperature(logits, labels)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * temperature)
    assert fit_temperature(logits + torch.arange(200.0).unsqueeze(1), labels) == pytest.approx(temperature)
    assert fit_temperature(logits.flip(0), labels.flip(0)) == pytest.approx(temperature)


def test_the_likelihood_never_falls():
    for seed in range(5):
        logits, labels = drawn(12, seed=seed)
        before = F.cross_entropy(logits, labels)
        assert F.cross_entropy(logits / fit_temperature(logits, labels), labels) <= before + 1e-12


def test_all_right_and_all_wrong_stay_within_bounds():
    logits = 3 * torch.eye(3)
    assert fit_temperature(0.3 * logits, torch.arange(3)) == pytest.approx(SMALLEST)
    assert SMALLEST <= fit_temperature(100 * logits, torch.arange(3)) <= 1  # nothing to gain beyond
    assert fit_temperature(logits, torch.tensor([1, 2, 0])) == pytest.approx(LARGEST)
    assert fit_temperature(logits, torch.tensor([5, 5, 5])) == pytest.approx(LARGEST)


def test_logits_that_say_nothing_are_left_alone():
    assert fit_temperature(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) == 1.0


def test_huge_logits_give_a_finite_temperature():
    logits = torch.tensor([[1e4, -1e4], [1e4, -1e4], [-1e4, 1e4]])
    temperature = fit_temperature(logits, torch.tensor([0, 1, 1]))
    assert SMALLEST <= temperature <= LARGEST
    assert np.isfinite(scaled(logits, temperature).numpy()).all()


@pytest.mark.parametrize(
    ("logits", "message"),
    [(torch.zeros(0, 3), "found 0 images"), (torch.tensor([[0.0, -math.inf]]), "infinite")],
)
def test_no_images_and_infinite_logits_are_refused(logits, message):
    with pytest.raises(UserError, match=message):
        fit_temperature(logits, torch.zeros(len(logits), dtype=torch.long))

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.core.losses import (
    calibration_loss,
    calibrations,
    check_calibration,
    focal_loss,
    l1_loss,
    label_smoothing_loss,
    negative_entropy,
    prior_divergence,
    pseudo_label_loss,
    soft_target_loss,
)
from cdc_plugin.errors import ConfigError

ALL = ["focal", "l1", "label-smoothing", "mini-clusters", "none"]


def random_case(batch: int = 12, clusters: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    randomness = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, clusters, generator=randomness, dtype=torch.float64)
    return logits, F.softmax(torch.randn(batch, clusters, generator=randomness, dtype=torch.float64), dim=1)


def softmax_by_numpy(logits: torch.Tensor) -> np.ndarray:
    powers = np.exp(logits.numpy() - logits.numpy().max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_losses_agree_with_numpy():
    logits, targets = random_case()
    probs = softmax_by_numpy(logits)
    cross_entropy = -(targets.numpy() * np.log(probs)).sum(axis=1).mean()
    mean = probs.mean(axis=0)
    entropy = (mean * np.log(mean)).sum()
    assert soft_target_loss(logits, targets).item() == pytest.approx(cross_entropy)
    assert negative_entropy(logits).item() == pytest.approx(entropy)
    assert calibration_loss(logits, targets, 0.3).item() == pytest.approx(cross_entropy + 0.3 * entropy)
    other = calibration_loss(logits, targets, 0.3, lambda x, goal: 2 * soft_target_loss(x, goal))
    assert other.item() == pytest.approx(2 * cross_entropy + 0.3 * entropy)
    labels, mask = np.arange(12) % 4, np.arange(12) % 3 > 0
    picked = -np.log(probs[np.arange(12), labels])[mask].mean()
    assert pseudo_label_loss(logits, torch.from_numpy(labels), torch.from_numpy(mask)).item() == pytest.approx(picked)


def test_gradients_agree_with_finite_differences():
    logits, targets = random_case(6, 3)
    logits.requires_grad_()
    labels, mask = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([True, False, True, True, False, False])
    assert torch.autograd.gradcheck(lambda x: pseudo_label_loss(x, labels, mask), logits)
    assert torch.autograd.gradcheck(lambda x: calibration_loss(x, targets, 1.0), logits)
    assert torch.autograd.gradcheck(negative_entropy, logits)


def test_a_constant_added_to_a_row_of_logits_changes_no_loss():
    logits, targets = random_case()
    shift = torch.arange(12.0).unsqueeze(1) * 10
    torch.testing.assert_close(calibration_loss(logits + shift, targets, 1.0), calibration_loss(logits, targets, 1.0))


def test_divergence_from_shares_is_that_of_the_definition_and_negative_entropy_where_they_are_equal():
    logits = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    mean = logits.softmax(dim=1).mean(dim=0)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(mean), torch.distributions.Categorical(shares)
    )
    assert prior_divergence(logits, shares).item() == pytest.approx(expected.item())
    assert torch.autograd.gradcheck(lambda x: prior_divergence(x, shares), logits)
    equal = torch.full((4,), 0.25, dtype=torch.float64)
    assert prior_divergence(logits, equal).item() == pytest.approx(negative_entropy(logits).item() + math.log(4))
    targets = torch.eye(4, dtype=torch.float64).repeat(5, 1)
    both = soft_target_loss(logits, targets) + 0.3 * expected
    assert calibration_loss(logits, targets, 0.3, shares=shares).item() == pytest.approx(both.item())


def test_even_clusters_have_the_least_negative_entropy():
    for clusters in (2, 10, 200):
        assert negative_entropy(torch.zeros(5, clusters)).item() == pytest.approx(-math.log(clusters), rel=1e-5)
        collapsed = torch.zeros(5, clusters)
        collapsed[:, 0] = 1e4
        assert negative_entropy(collapsed).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("trusted", [[0, 2], []])
def test_untrusted_samples_get_no_gradient(trusted):
    logits = torch.randn(4, 3).requires_grad_()
    mask = torch.isin(torch.arange(4), torch.tensor(trusted))
    loss = pseudo_label_loss(logits, torch.tensor([0, 1, 2, 0]), mask)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.any(dim=1).tolist() == mask.tolist()
    assert (loss > 0) == bool(trusted)


def labelled_case(batch: int = 20, clusters: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels."""
    randomness = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(batch, clusters, generator=randomness, dtype=torch.float64)
    return logits, torch.randint(clusters, (batch,), generator=randomness)


def one_hot(labels: torch.Tensor, clusters: int = 5) -> torch.Tensor:
    return F.one_hot(labels, clusters).double()


def test_the_names_and_strengths_are_those_of_the_comparison():
    assert calibrations.names() == ALL
    assert [name for name in ALL if calibrations.get(name).regional] == ["mini-clusters"]
    assert [calibrations.get(name).strength for name in ALL] == [3.0, 0.01, 0.1, 0.0, 0.0]


@pytest.mark.parametrize("name", ["mini-clusters", "none"])
def test_without_a_penalty_the_loss_is_that_of_the_targets_at_any_strength(name):
    logits, labels = labelled_case()
    targets = 0.7 * one_hot(labels) + 0.06
    for strength in (0.0, 2.0):
        assert calibrations.get(name).loss(logits, targets, strength) == soft_target_loss(logits, targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
def test_label_smoothing_is_that_of_torch(smoothing):
    logits, labels = labelled_case()
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing).item()
    assert label_smoothing_loss(logits, one_hot(labels), smoothing).item() == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 3.0])
def test_focal_loss_is_that_of_a_loop(gamma):
    logits, labels = labelled_case()
    losses = []
    for row, label in zip(logits.numpy(), labels.tolist(), strict=True):
        p = np.exp(row[label]) / np.exp(row).sum()
        losses.append(-((1 - p) ** gamma) * np.log(p))
    assert focal_loss(logits, one_hot(labels), gamma).item() == pytest.approx(np.mean(losses))


def test_l1_loss_by_hand():
    logits = torch.tensor([[math.log(3), 0.0], [-2.0, -2.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    entropy = (math.log(4 / 3) + math.log(2)) / 2
    assert l1_loss(logits, targets, 0.1).item() == pytest.approx(entropy + 0.1 * (math.log(3) + 4) / 2)


@pytest.mark.parametrize("name", ALL)
def test_no_strength_is_no_penalty_and_the_order_of_samples_and_clusters_changes_nothing(name):
    logits, labels = labelled_case()
    calibration = calibrations.get(name)
    loss = calibration.loss(logits, one_hot(labels), calibration.strength).item()
    rows, columns = torch.arange(19, -1, -1), torch.tensor([2, 0, 4, 1, 3])
    turned = calibration.loss(logits[rows][:, columns], one_hot(labels)[rows][:, columns], calibration.strength)
    assert turned.item() == pytest.approx(loss)
    expected = F.cross_entropy(logits, labels).item()
    assert calibration.loss(logits, one_hot(labels), 0.0).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["label-smoothing", "focal", "l1"])
def test_a_penalty_makes_the_sure_less_sure_than_plain_cross_entropy(name):
    """Logits themselves are trained, towards certain labels: the penalty must keep confidence down."""
    confidence = {}
    for which in (name, "none"):
        calibration = calibrations.get(which)
        logits = torch.zeros(4, 4, requires_grad=True)
        for _ in range(200):
            loss = calibration.loss(logits, torch.eye(4), calibration.strength)
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits - gradient).detach().requires_grad_()
        confidence[which] = logits.softmax(dim=1).max(dim=1).values.mean().item()
    assert confidence[name] < confidence["none"] - 5e-3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
@pytest.mark.parametrize("right", [0, 1])
def test_huge_logits_give_finite_losses_and_gradients(name, size, right):
    calibration = calibrations.get(name)
    logits = torch.tensor([[size, -size, 0.0]] * 2, requires_grad=True)
    for strength in (calibration.strength, 0.5):  # a focal power below 1 has an infinite slope at p = 1
        fit = partial(calibration.loss, strength=strength)
        loss = calibration_loss(logits, torch.eye(3)[[right, right]], 1.0, fit)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert math.isfinite(loss.item())
        assert gradient.isfinite().all()


def test_temperature_is_refused_in_a_label_free_run():
    with pytest.raises(ConfigError, match=r"label-free.*cdc-compare --methods temperature") as caught:
        check_calibration("temperature")
    assert "\n" not in str(caught.value)
    assert "temperature" not in calibrations


@pytest.mark.parametrize(("name", "strength"), [("label-smoothing", 1.2), ("focal", -1.0), ("l1", math.nan)])
def test_a_strength_without_meaning_is_refused(name, strength):
    with pytest.raises(ConfigError, match="strength"):
        check_calibration(name, strength)
    assert check_calibration(name, 1.0) is check_calibration(name)

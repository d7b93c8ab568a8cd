import math

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
    plain_loss,
    pseudo_label_loss,
    soft_target_loss,
)
from cdc_plugin.errors import ConfigError

ALL = ["focal", "l1", "label-smoothing", "mini-clusters", "none"]
# Two samples of three clusters with probabilities 1/2, 1/4, 1/4 and 1/8, 1/8, 3/4; both of cluster 0.
LOGITS = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], dtype=torch.float64).log()
FIRST = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)


def random_case(batch: int = 12, clusters: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    randomness = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, clusters, generator=randomness, dtype=torch.float64)
    return logits, F.softmax(torch.randn(batch, clusters, generator=randomness, dtype=torch.float64), dim=1)


def softmax_by_numpy(logits: torch.Tensor) -> np.ndarray:
    powers = np.exp(logits.numpy() - logits.numpy().max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_pseudo_label_loss_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [5.0, 0.0]])
    loss = pseudo_label_loss(logits, torch.tensor([0, 1, 1]), torch.tensor([True, True, False]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)


def test_soft_target_loss_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    expected = -(0.5 * math.log(1 / 4) + 0.5 * math.log(3 / 4))
    assert soft_target_loss(logits, torch.tensor([[0.5, 0.5]])).item() == pytest.approx(expected)


def test_negative_entropy_by_hand():
    # The mean of .9/.1 and .1/.9 is even, though each prediction is sure.
    logits = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    assert negative_entropy(logits).item() == pytest.approx(-math.log(2))
    one_sided = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
    assert negative_entropy(one_sided).item() == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1))


def test_losses_agree_with_numpy():
    logits, targets = random_case()
    probs = softmax_by_numpy(logits)
    cross_entropy = -(targets.numpy() * np.log(probs)).sum(axis=1).mean()
    mean = probs.mean(axis=0)
    entropy = (mean * np.log(mean)).sum()
    assert soft_target_loss(logits, targets).item() == pytest.approx(cross_entropy)
    assert negative_entropy(logits).item() == pytest.approx(entropy)
    assert calibration_loss(logits, targets, 0.3).item() == pytest.approx(cross_entropy + 0.3 * entropy)
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


def test_order_of_samples_and_numbers_of_clusters_do_not_matter():
    logits, targets = random_case()
    samples = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    clusters = torch.tensor([2, 0, 3, 1])
    before = calibration_loss(logits, targets, 1.0)
    after = calibration_loss(logits[samples][:, clusters], targets[samples][:, clusters], 1.0)
    torch.testing.assert_close(after, before)


def test_a_constant_added_to_a_row_of_logits_changes_no_loss():
    logits, targets = random_case()
    shift = torch.arange(12.0).unsqueeze(1) * 10
    torch.testing.assert_close(calibration_loss(logits + shift, targets, 1.0), calibration_loss(logits, targets, 1.0))


def test_even_clusters_have_the_least_negative_entropy():
    for clusters in (2, 10, 200):
        assert negative_entropy(torch.zeros(5, clusters)).item() == pytest.approx(-math.log(clusters), rel=1e-5)
        collapsed = torch.zeros(5, clusters)
        collapsed[:, 0] = 1e4
        assert negative_entropy(collapsed).item() == pytest.approx(0, abs=1e-6)


def test_untrusted_samples_get_no_gradient():
    logits = torch.randn(4, 3).requires_grad_()
    pseudo_label_loss(logits, torch.tensor([0, 1, 2, 0]), torch.tensor([True, False, True, False])).backward()
    assert logits.grad is not None
    assert not logits.grad[[1, 3]].any()
    assert logits.grad[[0, 2]].abs().sum() > 0


def test_no_trusted_sample_gives_zero_with_zero_gradient():
    logits = torch.randn(4, 3).requires_grad_()
    loss = pseudo_label_loss(logits, torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("clusters", [2, 7])
def test_huge_logits_and_hard_targets_leave_losses_and_gradients_finite(size, clusters):
    logits = torch.full((6, clusters), -size)
    logits[:, 0] = size
    logits.requires_grad_()
    targets = F.one_hot(torch.zeros(6, dtype=torch.long), clusters).float()
    loss = calibration_loss(logits, targets, 1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_batch_of_one_sample_will_do():
    logits = torch.randn(1, 2).requires_grad_()
    calibration_loss(logits, torch.tensor([[0.3, 0.7]]), 1.0).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def labelled_case(batch: int = 20, clusters: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels."""
    randomness = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(batch, clusters, generator=randomness, dtype=torch.float64)
    return logits, torch.randint(clusters, (batch,), generator=randomness)


def one_hot(labels: torch.Tensor, clusters: int = 5) -> torch.Tensor:
    return F.one_hot(labels, clusters).double()


def test_the_names_are_those_of_the_comparison():
    assert calibrations.names() == ALL
    assert [name for name in ALL if calibrations.get(name).regional] == ["mini-clusters"]
    assert {name: calibrations.get(name).strength for name in ("label-smoothing", "focal", "l1")} == {
        "label-smoothing": 0.1,
        "focal": 3.0,
        "l1": 0.01,
    }


def test_mini_clusters_is_the_soft_target_loss_at_any_strength():
    logits, labels = labelled_case()
    targets = 0.7 * one_hot(labels) + 0.06
    for strength in (0.0, 2.0):
        assert calibrations.get("mini-clusters").loss(logits, targets, strength) == soft_target_loss(logits, targets)


def test_no_penalty_is_cross_entropy_with_the_labels():
    logits, labels = labelled_case()
    assert plain_loss(logits, one_hot(labels), 5.0).item() == pytest.approx(F.cross_entropy(logits, labels).item())


def test_label_smoothing_by_hand():
    # e = .3 and C = 3 make targets .8, .1, .1; logs of 1/2, 1/4, 3/4, 1/8 are -1, -2, log2(3) - 2, -3 times log 2.
    first = 0.8 * 1 + 0.1 * 2 + 0.1 * 2
    second = 0.8 * 3 + 0.1 * 3 + 0.1 * (2 - math.log2(3))
    assert label_smoothing_loss(LOGITS, FIRST, 0.3).item() == pytest.approx(math.log(2) * (first + second) / 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
def test_label_smoothing_is_that_of_torch(smoothing):
    logits, labels = labelled_case()
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing).item()
    assert label_smoothing_loss(logits, one_hot(labels), smoothing).item() == pytest.approx(expected)


def test_focal_loss_by_hand():
    first, second = (1 / 2) ** 2 * 1, (7 / 8) ** 2 * 3  # (1 - p)^2 · -log2 p for p = 1/2 and 1/8
    assert focal_loss(LOGITS, FIRST, 2.0).item() == pytest.approx(math.log(2) * (first + second) / 2)


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


def test_l1_loss_is_cross_entropy_and_a_norm():
    logits, labels = labelled_case()
    norm = np.linalg.norm(logits.numpy(), ord=1, axis=1).mean()
    expected = F.cross_entropy(logits, labels).item() + 0.01 * norm
    assert l1_loss(logits, one_hot(labels), 0.01).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_samples_and_clusters_changes_nothing(name):
    logits, labels = labelled_case()
    calibration = calibrations.get(name)
    loss = calibration.loss(logits, one_hot(labels), calibration.strength).item()
    rows, columns = torch.arange(19, -1, -1), torch.tensor([2, 0, 4, 1, 3])
    turned = calibration.loss(logits[rows][:, columns], one_hot(labels)[rows][:, columns], calibration.strength)
    assert turned.item() == pytest.approx(loss)


@pytest.mark.parametrize("name", ALL)
def test_no_strength_is_no_penalty(name):
    logits, labels = labelled_case()
    assert calibrations.get(name).loss(logits, one_hot(labels), 0.0).item() == pytest.approx(
        F.cross_entropy(logits, labels).item()
    )


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
@pytest.mark.parametrize("size", [1e4, 30.0])
@pytest.mark.parametrize("right", [0, 1])
def test_huge_logits_give_finite_losses_and_gradients(name, size, right):
    calibration = calibrations.get(name)
    logits = torch.tensor([[size, -size, 0.0]] * 2, requires_grad=True)
    for strength in (calibration.strength, 0.5):  # a focal power below 1 has an infinite slope at p = 1
        loss = calibration.loss(logits, torch.eye(3)[[right, right]], strength)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert math.isfinite(loss.item())
        assert gradient.isfinite().all()


def test_temperature_is_refused_in_a_label_free_run():
    with pytest.raises(ConfigError, match=r"label-free.*cdc-compare --methods temperature") as caught:
        check_calibration("temperature")
    assert "\n" not in str(caught.value)
    assert "temperature" not in calibrations


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown calibration 'focl'; did you mean 'focal'\?"):
        check_calibration("focl")


@pytest.mark.parametrize(("name", "strength"), [("label-smoothing", 1.2), ("focal", -1.0), ("l1", math.nan)])
def test_a_strength_without_meaning_is_refused(name, strength):
    with pytest.raises(ConfigError, match="strength"):
        check_calibration(name, strength)


def test_a_checked_calibration_is_the_registered_one():
    assert check_calibration("focal", 5.0) is calibrations.get("focal")
    assert check_calibration("label-smoothing", 1.0) is check_calibration("label-smoothing")

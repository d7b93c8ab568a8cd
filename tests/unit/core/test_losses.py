import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.core.losses import calibration_loss, negative_entropy, pseudo_label_loss, soft_target_loss


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

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdc_plugin.comparison.baselines.dcboost import discriminative_losses, select_consistent, train_dcboost
from tests.helpers.blob_tasks import blob_task, linear_backbone, purity


@pytest.mark.parametrize("backbone", [linear_backbone(), nn.Identity()], ids=["trained", "frozen"])
@pytest.mark.parametrize("epochs", [0, 4])
def test_three_blobs_are_found_with_or_without_a_backbone_to_train(backbone, epochs):
    logs: list[dict[str, float]] = []
    task, truth = blob_task(backbone, logs, epochs=epochs, lr_heads=0.01, lr_backbone=0.01)
    before = torch.get_rng_state()
    labels = train_dcboost(task)
    assert torch.equal(torch.get_rng_state(), before)
    assert purity(labels, truth) > 0.95
    assert [log["epoch"] for log in logs] == list(range(1, epochs + 1))
    for log in logs:
        assert log["loss"] == pytest.approx(sum(log[name] for name in log if name.endswith("_loss")), abs=1e-5)
    assert all(last["negative_loss"] <= logs[0]["negative_loss"] + 0.05 for last in logs[-1:])


def test_the_best_number_of_neighbours_agrees_with_loops(randomness):
    features = F.normalize(torch.randn(40, 3, generator=randomness), dim=1)
    labels = (features[:, 0] > 0.1).long() + (features[:, 1] > 0).long()
    order = [sorted(set(range(40)) - {i}, key=lambda j, i=i: -float(features[i] @ features[j])) for i in range(40)]
    best, expected = -1.0, []
    for k in range(1, 40):
        chosen = [all(labels[j] == labels[i] for j in order[i][:k]) for i in range(40)]
        if k * sum(chosen) > best:
            best, expected = k * sum(chosen), chosen
    assert 0 < sum(expected) < 40
    assert select_consistent(features, labels).tolist() == expected


def test_the_losses_agree_with_loops_over_pairs(randomness):
    online, target = (F.normalize(torch.randn(9, 4, generator=randomness), dim=1) for _ in range(2))
    labels = torch.tensor([0, 0, 0, 2, 2, 5, 5, 5, 5])
    positive, negative, sums = 0.0, 0.0, {}
    for cluster in (0, 2, 5):
        rows = (labels == cluster).nonzero().flatten().tolist()
        sums[cluster] = sum(online[i] for i in rows), sum(target[i] for i in rows)
        weight = 1 / float(sums[cluster][0].norm() * sums[cluster][1].norm())
        positive += weight * sum(float((online[i] - target[j]).square().sum()) for i in rows for j in rows) / (2 * 3)
    for one in sums:
        for other in sums:
            if one != other:
                apart = F.normalize(sums[one][0], dim=0) - F.normalize(sums[other][1], dim=0)
                negative -= float(apart.square().sum()) / 6
    found = discriminative_losses(online, target, labels)
    assert [each.item() for each in found] == pytest.approx([positive, negative], rel=1e-4)


def test_nothing_selected_costs_nothing():
    rows = torch.zeros(0, 4, requires_grad=True)
    found = discriminative_losses(rows, rows, torch.zeros(0, dtype=torch.long))
    assert [each.item() for each in found] == [0, 0]

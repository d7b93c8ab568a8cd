import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.comparison.baselines import secu
from cdc_plugin.comparison.baselines.secu import (
    KeepSize,
    assign_by_entropy,
    keep_entropy,
    representation_loss,
    stable_center_loss,
    train_secu,
    train_secu_size,
    update_duals,
)
from cdc_plugin.core.kmeans import nearest
from tests.helpers.blob_tasks import CLUSTERS, blob_task, linear_backbone, predict, purity


def test_it_starts_as_k_means_on_the_projected_features():
    task, truth = blob_task(linear_backbone(), epochs=0)
    head = train_secu(task)
    found = predict(task, head)
    with torch.no_grad():
        points = F.normalize(head.projection(task.features), dim=1)
    means = torch.stack([points[found == cluster].mean(dim=0) for cluster in range(CLUSTERS)])
    assert torch.equal(nearest(points, means)[0], found)  # a fixed point of Lloyd's iterations
    torch.testing.assert_close(head.centers.detach(), F.normalize(means, dim=1))
    before = head.projection[0](task.features)
    torch.testing.assert_close(head.projection[1].running_mean, before.mean(dim=0))
    assert purity(found, truth) > 0.9


@pytest.mark.parametrize("train", [train_secu, train_secu_size])
def test_centers_from_anywhere_find_the_blobs(train, monkeypatch):
    start = secu._start

    def elsewhere(task):
        head, labels = start(task)
        with torch.no_grad():
            head.centers.copy_(head.centers[:1] + 0.1 * torch.randn(head.centers.shape, generator=randomness))
        return head, torch.arange(len(labels)) % CLUSTERS

    randomness = torch.Generator().manual_seed(0)
    monkeypatch.setattr(secu, "_start", elsewhere)
    task, truth = blob_task(linear_backbone(), epochs=0)
    assert purity(predict(task, train(task)), truth) < 0.9
    randomness = torch.Generator().manual_seed(0)
    task, truth = blob_task(linear_backbone(), epochs=15, lr_heads=0.01, lr_backbone=0.002)
    assert purity(predict(task, train(task)), truth) > 0.95


def test_features_follow_the_labels_and_centers_with_which_the_epoch_began(monkeypatch):
    untrained, _ = blob_task(linear_backbone(), epochs=0)
    partition = predict(untrained, train_secu(untrained))
    task, _ = blob_task(linear_backbone(), epochs=2)
    center_loss, feature_loss = secu.stable_center_loss, secu.representation_loss
    rows_seen, for_centers, for_features = [], [], []

    def weak(rows, drawn):
        rows_seen.append(rows)
        return task.weak(rows, drawn)

    def watched_centers(cosines, labels, temperature):
        for_centers.append((cosines.detach(), labels))
        return center_loss(cosines, labels, temperature)

    def watched_features(first, second, labels, temperature, weight):
        for_features.append((first.detach(), labels))
        assert (temperature, weight) == (0.05, 0.2)
        return feature_loss(first, second, labels, temperature, weight)

    monkeypatch.setattr(secu, "stable_center_loss", watched_centers)
    monkeypatch.setattr(secu, "representation_loss", watched_features)
    monkeypatch.setattr(secu, "keep_entropy", lambda _, rows, labels: (labels[rows] + 1) % CLUSTERS)
    train_secu(dataclasses.replace(task, weak=weak))
    steps = zip(rows_seen, for_centers[::2], for_features, strict=True)  # centres are moved by both views
    for step, (rows, (now, new), (as_began, old)) in enumerate(steps):
        epoch = step // 4  # of four sub-batches
        assert torch.equal(old, (partition[rows] + epoch) % CLUSTERS)
        assert torch.equal(new, (partition[rows] + epoch + 1) % CLUSTERS)
        assert torch.allclose(now, as_began, atol=1e-6) == (step % 4 == 0)
    assert len(rows_seen) == 8


def test_the_entropy_is_that_of_the_whole_set_not_of_the_batch():
    # A tie of cosines: whoever asks goes to the smaller cluster, and stays if both are as large.
    cosines, rows = torch.zeros(1, 2), torch.tensor([0])
    assert keep_entropy(cosines, rows, torch.tensor([0, 0, 0, 1])).tolist() == [1]
    assert keep_entropy(cosines, rows, torch.tensor([0, 1, 1, 0])).tolist() == [0]


def test_a_cluster_below_its_minimum_size_attracts_more_points_from_batch_to_batch():
    assign = KeepSize(2, torch.device("cpu"))
    cosines, rows, labels = torch.tensor([[0.06, 0.0]] * 10), torch.arange(10), torch.zeros(10, dtype=torch.long)
    # Nobody is in the second cluster: its dual variable grows by .1 * .9 / 2 = .045 per batch.
    batches = [assign(cosines, rows, labels).sum().item() for _ in range(3)]
    assert batches == [0, 0, 10]
    # Shares 3/4, 1/4, 0 against a least share of .3: -.45, .05, .3, times the rate; none falls below 0.
    duals = update_duals(torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0, 0, 1, 0]), 0.3, 0.5)
    torch.testing.assert_close(duals, torch.tensor([0.0, 0.125, 0.25]))


def random_cosines(seed: int = 0) -> torch.Tensor:
    return torch.rand(30, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def test_a_center_is_moved_by_its_own_points_and_most_by_hard_ones():
    points = F.normalize(torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    centers = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    labels = torch.arange(12) % 3
    stable_center_loss(points @ centers.T, labels, 0.2).backward()
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for point, label in zip(points, labels.tolist(), strict=True):
        own = F.softmax(centers.detach() @ point / 0.2, dim=0)[label]
        expected[label] -= (1 - own) * point / (0.2 * 12)
    torch.testing.assert_close(centers.grad, expected)


def test_representation_loss_and_its_gradient_by_hand():
    # The first view is at 3/4, the second at 1/2; targets: .2 + .8/2 = .6 and .2 + .8 * 3/4 = .8.
    first, second = torch.tensor([[0.1 * math.log(3.0), 0.0]]), torch.tensor([[0.0, 0.0]])
    by_first = -(0.6 * math.log(3 / 4) + 0.4 * math.log(1 / 4))
    by_second = math.log(2)
    loss = representation_loss(first, second, torch.tensor([0]), 0.1, 0.2)
    assert loss.item() == pytest.approx((by_first + by_second) / 2)
    # The gradient is that of fixed targets.
    first, second = (random_cosines(seed=seed).requires_grad_() for seed in (0, 1))
    labels = torch.arange(30) % 4
    representation_loss(first, second, labels, 0.1, 0.3).backward()
    probs = [F.softmax(view.detach() / 0.1, dim=1) for view in (first, second)]
    targets = [0.7 * other + 0.3 * F.one_hot(labels, 4) for other in reversed(probs)]
    for view, prob, target in zip((first, second), probs, targets, strict=True):
        torch.testing.assert_close(view.grad, (prob - target) / 0.1 / 30 / 2)


@pytest.mark.parametrize("weight", [0.0, 0.12, 1.0, 20.0])
def test_entropic_moves_agree_with_trying_every_cluster(weight):
    cosines = random_cosines()
    sizes = [12, 1, 0, 17]  # the second holds one point, the third none
    labels = [0] * 12 + [1] + [3] * 17
    expected = []
    for row, old in zip(cosines.tolist(), labels, strict=True):
        values = []
        for new in range(4):
            moved = list(sizes)
            moved[old] -= 1
            moved[new] += 1
            negative_entropy = sum(size / 30 * math.log(size / 30) for size in moved if size)
            values.append(row[new] - weight * 30 * negative_entropy)
        expected.append(max(range(4), key=values.__getitem__))
    found = assign_by_entropy(cosines, torch.tensor(labels), torch.tensor(sizes), weight)
    assert found.tolist() == expected


def test_a_million_points_are_counted_to_the_last_one_and_a_single_one_gives_no_nan():
    # The clusters differ by a factor of e: moving to the smaller one is worth 1.
    sizes = torch.tensor([1_000_000, round(1_000_000 / math.e)])
    labels = torch.tensor([0, 0])
    found = assign_by_entropy(torch.tensor([[0.9999, 0.0], [1.0001, 0.0]]), labels, sizes, 1.0)
    assert found.tolist() == [1, 0]
    for place in (0, 2):  # wherever a lone point lies, the entropy is 0: only the cosine counts
        sizes = F.one_hot(torch.tensor(place), 3)
        assert assign_by_entropy(torch.tensor([[0.1, 0.3, 0.2]]), torch.tensor([place]), sizes, 5.0).tolist() == [1]


def test_cosines_far_beyond_the_temperature_leave_losses_finite():
    cosines = torch.tensor([[1.0, -1.0], [1.0, -1.0]]).requires_grad_()
    labels = torch.tensor([1, 1])
    loss = stable_center_loss(cosines, labels, 1e-4) + representation_loss(cosines, cosines, labels, 1e-4, 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(cosines.grad).all()

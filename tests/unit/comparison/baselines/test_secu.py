import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdc_plugin.comparison.baselines import secu
from cdc_plugin.comparison.baselines.secu import KeepSize, keep_entropy, train_secu, train_secu_size
from cdc_plugin.core.kmeans import nearest
from cdc_plugin.models.heads import CosineHead, build_head
from tests.helpers.blob_tasks import CLUSTERS, FEATURES, blob_task, linear_backbone, predictions, purity

BOTH = pytest.mark.parametrize("train", [train_secu, train_secu_size])


def test_it_starts_as_k_means_on_the_projected_features():
    task, truth = blob_task(linear_backbone(), epochs=0)
    head = train_secu(task)
    found = predictions(task, head)
    with torch.no_grad():
        points = F.normalize(head.projection(task.features), dim=1)
    means = torch.stack([points[found == cluster].mean(dim=0) for cluster in range(CLUSTERS)])
    assert torch.equal(nearest(points, means)[0], found)  # a fixed point of Lloyd's iterations
    torch.testing.assert_close(head.centers.detach(), F.normalize(means, dim=1))
    before = head.projection[0](task.features)
    torch.testing.assert_close(head.projection[1].running_mean, before.mean(dim=0))
    assert purity(found, truth) > 0.9


@BOTH
def test_three_blobs_are_found_with_or_without_a_backbone_to_train(train):
    for backbone in (linear_backbone(), nn.Identity()):
        task, truth = blob_task(backbone, epochs=6, lr_heads=0.003, lr_backbone=0.001)
        assert purity(predictions(task, train(task)), truth) > 0.95


@BOTH
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
    assert purity(predictions(task, train(task)), truth) < 0.9
    randomness = torch.Generator().manual_seed(0)
    task, truth = blob_task(linear_backbone(), epochs=15, lr_heads=0.01, lr_backbone=0.002)
    assert purity(predictions(task, train(task)), truth) > 0.95


@BOTH
def test_the_head_comes_back_ready_for_use_and_can_be_built_again(train):
    backbone = linear_backbone()
    task, _ = blob_task(backbone, epochs=1)
    head = train(task)
    assert isinstance(head, CosineHead)
    assert not head.training
    assert head.temperature == 0.05
    assert not torch.equal(task.backbone.weight, backbone.weight)
    again = build_head(head.spec, FEATURES, "here")
    again.load_state_dict(head.state_dict())
    torch.testing.assert_close(again.eval()(task.features), head(task.features))


@BOTH
def test_a_seed_gives_the_same_head_and_leaves_other_randomness_alone(train):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    heads = [train(blob_task(linear_backbone(), epochs=2, seed=seed)[0]) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(heads[0].centers, heads[1].centers)
    untrained = [train(blob_task(linear_backbone(), epochs=0, seed=seed)[0]) for seed in (1, 2)]
    for one, other in ((heads[0], heads[2]), untrained):
        assert not torch.equal(one.centers, other.centers)


def test_features_follow_the_labels_and_centers_with_which_the_epoch_began(monkeypatch):
    untrained, _ = blob_task(linear_backbone(), epochs=0)
    partition = predictions(untrained, train_secu(untrained))
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


def test_losses_and_moved_points_are_told_after_every_epoch():
    logs: list[dict[str, float]] = []
    train_secu(blob_task(linear_backbone(), logs, epochs=3)[0])
    assert [log["epoch"] for log in logs] == [1, 2, 3]
    for log in logs:
        assert log["loss"] == pytest.approx(log["center_loss"] + log["representation_loss"], abs=1e-5)
        assert 0 <= log["moved"] <= 1


def test_the_entropy_is_that_of_the_whole_set_not_of_the_batch():
    # A tie of cosines: whoever asks goes to the smaller cluster, and stays if both are as large.
    cosines, rows = torch.zeros(1, 2), torch.tensor([0])
    assert keep_entropy(cosines, rows, torch.tensor([0, 0, 0, 1])).tolist() == [1]
    assert keep_entropy(cosines, rows, torch.tensor([0, 1, 1, 0])).tolist() == [0]


def test_a_cluster_below_its_least_size_draws_points_from_batch_to_batch():
    assign = KeepSize(2, torch.device("cpu"))
    cosines, rows, labels = torch.tensor([[0.06, 0.0]] * 10), torch.arange(10), torch.zeros(10, dtype=torch.long)
    # Nobody is in the second cluster: its dual variable grows by .1 * .9 / 2 = .045 a batch.
    batches = [assign(cosines, rows, labels).sum().item() for _ in range(3)]
    assert batches == [0, 0, 10]

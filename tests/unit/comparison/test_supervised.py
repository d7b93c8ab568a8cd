import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.task import Task
from cdc_plugin.comparison.supervised import calibrate_by_temperature, split, train_linear, train_supervised
from cdc_plugin.comparison.temperature import fit_temperature, scaled
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.report_record import measure_head
from cdc_plugin.models.heads import LayeredHead

CPU = torch.device("cpu")


def blobs(images: int = 120, classes: int = 3, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Points (N, 4) around the corners of a cube, and their classes."""
    randomness = torch.Generator().manual_seed(1)
    labels = torch.arange(images) % classes
    return 2 * torch.eye(4)[labels] + spread * torch.randn(images, 4, generator=randomness), labels


def make_task(points: Tensor, backbone: nn.Module | None = None, **changes) -> Task:
    """A task whose images are points; strong views are shaken."""
    if backbone is None:
        torch.manual_seed(0)
        backbone = nn.Linear(4, 5)
    given = {"clusters": 3, "epochs": 20, "batch_size": 40, "sub_batch_size": 20, "lr_heads": 0.02, "lr_backbone": 0.02}
    with torch.no_grad():
        features = backbone(points)
    return Task(
        backbone=backbone,
        feature_dim=features.shape[1],
        images=len(points),
        plain=lambda rows, randomness: points[rows],
        weak=lambda rows, randomness: points[rows],
        strong=lambda rows, randomness: points[rows] + 0.1 * torch.randn(len(rows), 4, generator=randomness),
        features=features,
        config=RefineConfig(**{**given, **changes}),
        device=CPU,
        after_epoch=lambda means: None,
    )


def accuracy(task: Task, head: nn.Module, points: Tensor, labels: Tensor, rows: Tensor) -> float:
    with torch.no_grad():
        return (head(task.backbone(points[rows])).argmax(dim=1) == labels[rows]).float().mean().item()


def test_every_row_is_either_labelled_or_reported_on():
    labelled, reported = split(11, seed=0)
    assert (len(labelled), len(reported)) == (5, 6)
    assert sorted(labelled.tolist() + reported.tolist()) == list(range(11))
    assert labelled.tolist() == sorted(labelled.tolist())


def test_the_split_depends_on_the_seed_only():
    assert torch.equal(split(100, seed=3)[0], split(100, seed=3)[0])
    assert not torch.equal(split(100, seed=3)[0], split(100, seed=4)[0])


def test_one_image_cannot_be_split():
    with pytest.raises(UserError, match="at least 2"):
        split(1, seed=0)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_linear_classifier_is_that_of_scikit_learn_on_standardised_features(classes):
    points, labels = blobs(classes=classes)
    task = make_task(points * torch.tensor([1.0, 50.0, 0.01, 1.0]) + 7, nn.Identity())
    rows = split(120, seed=0)[0]
    head = train_linear(task, labels, rows)

    features = task.features.double()
    mean, spread = features[rows].mean(dim=0), features[rows].std(dim=0, correction=0)
    ready = ((features - mean) / spread).numpy()
    # Two classes get two rows of weights here, of which each carries half of the penalty.
    penalty = 2.0 if classes == 2 else 1.0
    oracle = LogisticRegression(C=penalty, tol=1e-8, max_iter=1000).fit(ready[rows], labels[rows].numpy())
    with torch.no_grad():
        probs = F.softmax(head(task.features), dim=1)
    assert np.allclose(probs.numpy(), oracle.predict_proba(ready), atol=2e-4)


def test_the_linear_classifier_leaves_the_backbone_alone_and_takes_its_raw_features():
    points, labels = blobs()
    task = make_task(points)
    before = task.backbone.weight.clone()
    labelled, reported = split(120, seed=0)
    head = train_linear(task, labels, labelled)
    assert torch.equal(task.backbone.weight, before)
    assert isinstance(head, LayeredHead)
    assert accuracy(task, head, points, labels, reported) > 0.9


def test_labels_that_were_not_given_are_not_looked_at():
    points, labels = blobs()
    labelled, reported = split(120, seed=0)
    hidden = labels.clone()
    hidden[reported] = 77
    for train in (train_linear, train_supervised):
        first, second = (train(make_task(points), given, labelled) for given in (labels, hidden))
        assert torch.equal(first[0].weight, second[0].weight)


@pytest.mark.parametrize("train", [train_linear, train_supervised])
def test_numbers_of_classes_may_have_gaps(train):
    points, labels = blobs()
    labelled, _ = split(120, seed=0)
    head, gaps = (train(make_task(points), given, labelled) for given in (labels, 10 * labels - 4))
    assert gaps.clusters == 3
    assert torch.equal(gaps[0].weight, head[0].weight)


def test_a_feature_that_never_moves_does_no_harm():
    points, labels = blobs()
    points[:, 3] = 1e-3
    task = make_task(points, nn.Identity())
    labelled, reported = split(120, seed=0)
    head = train_linear(task, labels, labelled)
    assert head[0].weight.isfinite().all()
    assert accuracy(task, head, points, labels, reported) > 0.9


def test_separable_classes_have_finite_weights():
    points, labels = blobs(spread=0.01)
    head = train_linear(make_task(points, nn.Identity()), labels, torch.arange(0, 120, 2))
    assert head[0].weight.abs().max() < 50


def test_no_labelled_image_is_refused():
    points, labels = blobs()
    for train in (train_linear, train_supervised):
        with pytest.raises(UserError, match="found none"):
            train(make_task(points), labels, torch.arange(0))


def test_fine_tuning_moves_the_backbone_and_learns_what_a_frozen_one_has_lost():
    points, labels = blobs()
    blind = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    with torch.no_grad():
        blind[0].weight[:, :2] = 0  # of the three corners the first two look the same
    labelled, reported = split(120, seed=0)
    frozen = make_task(points, blind.eval())
    poor = accuracy(frozen, train_linear(frozen, labels, labelled), points, labels, reported)
    losses = []
    task = dataclasses.replace(frozen, after_epoch=losses.append)
    head = train_supervised(task, labels, labelled)
    assert poor < 0.8
    assert accuracy(task, head, points, labels, reported) > 0.9
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    assert len(losses) == 20
    assert not blind.training


def test_fine_tuning_shows_labelled_images_only_each_twice_an_epoch():
    points, labels = blobs()
    seen: list[Tensor] = []

    def strong(rows: Tensor, randomness: torch.Generator) -> Tensor:
        seen.append(rows)
        return points[rows]

    labelled, _ = split(120, seed=0)
    train_supervised(dataclasses.replace(make_task(points, epochs=1), strong=strong), labels, labelled)
    assert torch.equal(torch.cat(seen).sort().values, labelled.repeat_interleave(2))


def test_fine_tuning_is_repeatable_and_depends_on_the_seed():
    points, labels = blobs()
    labelled, _ = split(120, seed=0)
    heads = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        task = make_task(points, seed=seed)
        torch.manual_seed(noise)  # what ran before must not matter
        heads.append(train_supervised(task, labels, labelled)[0].weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_frozen_backbone_is_no_obstacle():
    points, labels = blobs()
    task = make_task(points, nn.Identity())
    labelled, reported = split(120, seed=0)
    assert accuracy(task, train_supervised(task, labels, labelled), points, labels, reported) > 0.9


def overconfident(images: int = 2000, clusters: int = 4, factor: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities four times too sure, with labels 10, 20, ... that name the clusters in another order."""
    randomness = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, clusters, generator=randomness)
    drawn = torch.multinomial(F.softmax(logits, dim=1), 1, generator=randomness).squeeze(1)
    labels = torch.tensor([30, 10, 40, 20])[drawn]
    return F.softmax(factor * logits, dim=1).numpy(), labels.numpy()


def test_a_temperature_by_hand():
    # Cluster 1 is class 5 and cluster 0 class 8. Sure at 9 : 1 and right in 3 of 4 labelled rows: T = 2.
    probs = np.array([[0.9, 0.1]] * 4 + [[0.1, 0.9]] * 4 + [[0.5, 0.5]])
    labels = np.array([8, 8, 8, 5, 5, 5, 5, 8, 8])
    new = calibrate_by_temperature(probs, labels, np.arange(8))
    assert np.allclose(new, [[0.75, 0.25]] * 4 + [[0.25, 0.75]] * 4 + [[0.5, 0.5]])


def test_temperature_heals_overconfidence_on_rows_it_has_not_seen_and_moves_no_image():
    probs, labels = overconfident()
    labelled, reported = split(len(probs), seed=0)
    new = calibrate_by_temperature(probs, labels, labelled)
    before, after = (measure_head(table[reported], labels[reported]) for table in (probs, new))
    assert before["ECE"] > 0.15
    assert after["ECE"] < 0.05
    assert np.array_equal(new.argmax(axis=1), probs.argmax(axis=1))
    hidden = labels.copy()
    hidden[reported] = 99
    assert np.array_equal(calibrate_by_temperature(probs, torch.from_numpy(hidden), labelled), new)


def test_temperature_is_that_of_the_matched_columns():
    probs, labels = overconfident(300)
    columns = torch.tensor([{30: 0, 10: 1, 40: 2, 20: 3}[label] for label in labels.tolist()])
    logits = torch.from_numpy(probs).double().log()
    expected = scaled(logits, fit_temperature(logits, columns)).numpy()
    assert np.allclose(calibrate_by_temperature(probs, labels, torch.arange(300)), expected)


@pytest.mark.parametrize("merged", [20, 50])
def test_classes_may_be_fewer_or_more_than_clusters(merged):
    probs, labels = overconfident()
    labels = np.where(labels == 10, merged, labels)  # one class less
    if merged == 50:
        labels = np.where(np.arange(len(labels)) % 2 == 0, labels, labels + 1)  # twice as many
    labelled, reported = split(len(probs), seed=0)
    new = calibrate_by_temperature(probs, labels, labelled)
    assert np.isfinite(new).all()
    assert measure_head(new[reported], labels[reported])["ECE"] < measure_head(probs[reported], labels[reported])["ECE"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_of_exactly_0_and_1_stay_finite(dtype):
    probs = np.eye(3, dtype=dtype)[[0, 1, 2, 0]]
    new = calibrate_by_temperature(probs, np.array([0, 1, 2, 1]), np.arange(4))
    assert np.isfinite(new).all()
    assert np.allclose(new.sum(axis=1), 1)
    assert new[0, 0] == pytest.approx(0.75, abs=0.01)  # three of four are right

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import BaselineTask
from cdc_plugin.comparison.supervised import (
    calibrate_by_temperature,
    split_labelled,
    train_linear,
    train_supervised,
)
from cdc_plugin.comparison.temperature import LARGEST, SMALLEST, fit_temperature
from cdc_plugin.evaluation.records import measure_head
from cdc_plugin.models.heads import LayeredHead
from tests.helpers.blob_tasks import blob_task, linear_backbone, predict

LABELLED, REPORTED = split_labelled(120, seed=0)


def build_task(backbone: nn.Module | None = None, **changes) -> tuple[BaselineTask, Tensor]:
    rates = {"epochs": 20, "batch_size": 40, "sub_batch_size": 20, "lr_heads": 0.02, "lr_backbone": 0.02}
    return blob_task(backbone or linear_backbone(), **{**rates, **changes})


def accuracy(task: BaselineTask, head: nn.Module, labels: Tensor) -> float:
    return (predict(task, head) == labels)[REPORTED].float().mean().item()


def test_every_row_is_either_labelled_or_reported_on_by_the_seed():
    labelled, reported = split_labelled(11, seed=0)
    assert (len(labelled), len(reported)) == (5, 6)
    assert sorted(labelled.tolist() + reported.tolist()) == list(range(11))
    assert labelled.tolist() == sorted(labelled.tolist())
    assert torch.equal(split_labelled(11, seed=0)[0], labelled)
    assert not torch.equal(split_labelled(11, seed=4)[0], labelled)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_linear_classifier_is_that_of_scikit_learn_on_standardised_features(classes):
    task, labels = build_task(nn.Identity())
    labels = labels % classes
    scale = torch.tensor([1.0, 50.0, 0.01, 1.0, 3.0, 1.0])
    task = replace(task, features=(task.features + torch.randn(120, 6, generator=torch.Generator())) * scale + 7)
    head = train_linear(task, labels, LABELLED)

    features = task.features.double()
    mean, spread = features[LABELLED].mean(dim=0), features[LABELLED].std(dim=0, correction=0)
    ready = ((features - mean) / spread).numpy()
    # Two classes get two rows of weights here, of which each carries half of the penalty.
    penalty = 2.0 if classes == 2 else 1.0
    oracle = LogisticRegression(C=penalty, tol=1e-8, max_iter=1000).fit(ready[LABELLED], labels[LABELLED].numpy())
    with torch.no_grad():
        probs = F.softmax(head(task.features), dim=1)
    assert np.allclose(probs.numpy(), oracle.predict_proba(ready), atol=2e-4)


def test_the_linear_classifier_leaves_the_backbone_alone_and_takes_its_raw_features():
    task, labels = build_task()
    before = task.backbone.weight.clone()
    head = train_linear(task, labels, LABELLED)
    assert torch.equal(task.backbone.weight, before)
    assert isinstance(head, LayeredHead)
    assert accuracy(task, head, labels) > 0.9


@pytest.mark.parametrize("train", [train_linear, train_supervised])
def test_labels_outside_the_labelled_rows_are_not_read_and_numbers_of_classes_may_have_gaps(train):
    _, labels = build_task()
    hidden = 10 * labels - 4
    hidden[REPORTED] = 77
    first, second = (train(build_task()[0], known, LABELLED) for known in (labels, hidden))
    assert second.clusters == 3
    assert torch.equal(first[0].weight, second[0].weight)


def test_constant_features_and_separable_classes_have_finite_weights():
    task, labels = build_task(nn.Identity())
    separable = 2.0 * torch.eye(6)[labels] + 0.01 * task.features
    separable[:, 3] = 1e-3
    head = train_linear(replace(task, features=separable), labels, LABELLED)
    assert head[0].weight.abs().max() < 50
    assert (head(separable).argmax(dim=1) == labels).all()


def test_fine_tuning_moves_the_backbone_and_learns_what_a_frozen_one_has_lost():
    blind = nn.Sequential(linear_backbone(), nn.BatchNorm1d(8))
    with torch.no_grad():
        blind[0].weight[:, :2] = 0  # of the three centres the first two look the same
    logs: list[dict[str, float]] = []
    task, labels = build_task(blind.eval())
    task = replace(task, after_epoch=logs.append)
    assert accuracy(task, train_linear(task, labels, LABELLED), labels) < 0.8
    assert accuracy(task, train_supervised(task, labels, LABELLED), labels) > 0.9
    assert logs[-1]["loss"] < logs[0]["loss"] / 2
    assert len(logs) == 20
    assert not task.backbone.training
    task, labels = build_task(nn.Identity())  # nothing to tune
    assert accuracy(task, train_supervised(task, labels, LABELLED), labels) > 0.9


def test_fine_tuning_shows_labelled_images_only_each_twice_per_epoch():
    task, labels = build_task(epochs=1)
    seen: list[Tensor] = []

    def strong(rows: Tensor, randomness: torch.Generator) -> Tensor:
        seen.append(rows)
        return task.strong(rows, randomness)

    train_supervised(replace(task, strong=strong), labels, LABELLED)
    assert torch.equal(torch.cat(seen).sort().values, LABELLED.repeat_interleave(2))


def test_fine_tuning_is_repeatable_and_depends_on_the_seed():
    heads = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        task, labels = build_task(seed=seed)
        torch.manual_seed(noise)  # what ran before must not matter
        heads.append(train_supervised(task, labels, LABELLED)[0].weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def draw_samples(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels that were drawn from just their probabilities: T is 1 but for chance."""
    randomness = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, 4, generator=randomness, dtype=torch.float64)
    return logits, torch.multinomial(F.softmax(logits, dim=1), 1, generator=randomness).squeeze(1)


def overconfident() -> tuple[np.ndarray, np.ndarray]:
    """Probabilities four times too sure, with labels 10, 20, ... that name the clusters in another order."""
    logits, drawn = draw_samples(2000)
    return F.softmax(4 * logits, dim=1).numpy(), torch.tensor([30, 10, 40, 20])[drawn].numpy()


def test_a_temperature_by_hand():
    # Cluster 1 is class 5 and cluster 0 class 8. Sure at 9 : 1 and right in 3 of 4 labelled rows: T = 2.
    probs = np.array([[0.9, 0.1]] * 4 + [[0.1, 0.9]] * 4 + [[0.5, 0.5]])
    labels = np.array([8, 8, 8, 5, 5, 5, 5, 8, 8])
    new = calibrate_by_temperature(probs, labels, np.arange(8))
    assert np.allclose(new, [[0.75, 0.25]] * 4 + [[0.25, 0.75]] * 4 + [[0.5, 0.5]])


def test_temperature_heals_overconfidence_on_rows_it_has_not_seen_and_moves_no_image():
    probs, labels = overconfident()
    labelled, reported = split_labelled(len(probs), seed=0)
    new = calibrate_by_temperature(probs, labels, labelled)
    before, after = (measure_head(table[reported], labels[reported]) for table in (probs, new))
    assert before["ECE"] > 0.15
    assert after["ECE"] < 0.05
    assert np.array_equal(new.argmax(axis=1), probs.argmax(axis=1))
    hidden = labels.copy()
    hidden[reported] = 99
    assert np.array_equal(calibrate_by_temperature(probs, torch.from_numpy(hidden), labelled), new)


@pytest.mark.parametrize("merged", [20, 50])
def test_classes_may_be_fewer_or_more_than_clusters(merged):
    probs, labels = overconfident()
    labels = np.where(labels == 10, merged, labels)  # one class less
    if merged == 50:
        labels = np.where(np.arange(len(labels)) % 2 == 0, labels, labels + 1)  # twice as many
    labelled, reported = split_labelled(len(probs), seed=0)
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


def test_a_label_without_a_column_counts_as_an_even_target_by_hand():
    # One right and one even sample want a mean of 3/4 for the first column: again T = 2.
    logits = torch.tensor([[math.log(9), 0.0]] * 2)
    for nowhere in (2, 7, -1):
        assert fit_temperature(logits, torch.tensor([0, nowhere])) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("factor", [0.2, 1.0, 15.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_temperature_is_that_of_a_general_search(factor, seed):
    logits, labels = draw_samples(300, seed)

    def loss(log_temperature: float) -> float:
        return F.cross_entropy(factor * logits / math.exp(log_temperature), labels).item()

    best = minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9}).x
    assert fit_temperature(factor * logits, labels) == pytest.approx(math.exp(best), rel=1e-5)


def test_the_temperature_grows_with_the_logits_and_takes_no_notice_of_shifts_or_order():
    logits, labels = draw_samples(200)
    temperature = fit_temperature(logits, labels)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * temperature)
    assert fit_temperature(logits + torch.arange(200.0).unsqueeze(1), labels) == pytest.approx(temperature)
    assert fit_temperature(logits.flip(0), labels.flip(0)) == pytest.approx(temperature)


def test_all_right_all_wrong_and_huge_logits_stay_within_bounds():
    logits = 3 * torch.eye(3)
    huge = torch.tensor([[1e4, -1e4], [1e4, -1e4], [-1e4, 1e4]])
    assert SMALLEST <= fit_temperature(huge, torch.tensor([0, 1, 1])) <= LARGEST
    assert fit_temperature(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) == 1.0
    assert fit_temperature(0.3 * logits, torch.arange(3)) == pytest.approx(SMALLEST)
    assert SMALLEST <= fit_temperature(100 * logits, torch.arange(3)) <= 1  # nothing to gain beyond
    assert fit_temperature(logits, torch.tensor([1, 2, 0])) == pytest.approx(LARGEST)
    assert fit_temperature(logits, torch.tensor([5, 5, 5])) == pytest.approx(LARGEST)

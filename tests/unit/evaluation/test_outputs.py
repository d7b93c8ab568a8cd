import math

import numpy as np
import pytest
import torch
from torch import nn

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.models import open_model
from cdc_plugin.evaluation.outputs import (
    ModelOutputs,
    measure_outputs,
    outlier_reference,
    quality_card,
    run_model,
    score_outside,
)
from cdc_plugin.evaluation.records import measure_head
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead

CPU = torch.device("cpu")


def sure(*confidences: float) -> np.ndarray:
    return np.array([[value, 1 - value] for value in confidences], dtype=np.float32)


def build_outputs(features: torch.Tensor, clusters: int = 2) -> ModelOutputs:
    probs = np.eye(clusters, dtype=np.float32)[np.arange(len(features)) // 2 % clusters]
    return ModelOutputs(features, {"clustering_head": probs, "calibration_head": probs})


def open_clusterer(backbone, *heads: nn.Module):
    return open_model(Clusterer(backbone, heads[0], heads[-1]))


@pytest.fixture
def two_and_one(tiny_backbone):
    """A model with two heads, and one that has the second of them alone."""
    torch.manual_seed(1)
    first, second = (ClusterHead(8, 12, 3).eval() for _ in range(2))
    return [open_clusterer(tiny_backbone, *heads) for heads in ((first, second), (second,))]


def test_each_head_answers_for_itself_and_one_head_answers_once(two_and_one, digits):
    images = open_images(digits[0][:20], 32)
    both, one = (run_model(evaluated, images, CPU) for evaluated in two_and_one)
    second = two_and_one[1].model.calibration_head
    assert list(both.heads) == ["clustering_head", "calibration_head"]
    assert list(one.heads) == ["model"]
    with torch.no_grad():
        expected = second(both.features).softmax(dim=1).numpy()
    np.testing.assert_allclose(both.calibration, expected, atol=1e-6)
    np.testing.assert_array_equal(one.calibration, both.calibration)
    assert not np.allclose(both.clustering, both.calibration)


def test_figures_are_those_of_each_head_under_its_key(digits):
    labels = digits[1][:40] % 2
    probs = np.random.default_rng(0).dirichlet([1, 1], 40).astype(np.float32)
    found = measure_outputs(ModelOutputs(torch.zeros(40, 3), {"model": probs}), labels, labels)
    assert list(found) == ["kmeans", "model"]
    assert found["model"] == measure_head(probs, labels)
    assert found["kmeans"]["ACC"] == 1.0


def test_features_that_are_not_finite_are_refused(tiny_backbone, digits):
    next(tiny_backbone.parameters()).data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        run_model(open_clusterer(tiny_backbone, ClusterHead(8, 12, 3)), open_images(digits[0][:4], 32), CPU)


def test_a_card_with_one_head_does_not_praise_its_agreement_with_itself(two_and_one, digits):
    images = open_images(digits[0][:30], 32)
    cards = []
    for evaluated in two_and_one:
        outputs = run_model(evaluated, images, CPU)
        cards.append(quality_card(evaluated, outputs, outputs.calibration.argmax(axis=1), images, CPU))
    two, one = cards
    assert two["heads_agree"] is not None
    assert (one["heads_agree"], one["clustering_confidence"]) == (None, None)
    assert one["kmeans_agreement"] == 1.0
    assert one["expected_accuracy"] == two["expected_accuracy"]
    assert one["stability"] is None
    assert one["warnings"][0]["kind"] == "uncalibrated"
    assert "uncalibrated" not in {warning["kind"] for warning in two["warnings"]}


def test_confidence_tells_outside_images_by_pairs_counted_by_hand():
    inside = ModelOutputs(
        torch.eye(4), {"clustering_head": sure(0.9, 0.8, 0.9, 0.8), "calibration_head": sure(*[0.9] * 4)}
    )
    outside = ModelOutputs(torch.eye(4)[:2], {"clustering_head": sure(0.6, 0.85), "calibration_head": sure(0.6, 0.9)})
    scores = score_outside(inside, outside, outlier_reference(inside, None))
    assert list(scores) == ["clustering_head", "calibration_head", "distance"]
    assert scores["clustering_head"]["AUROC"] == 0.75  # 0.9 beats both, 0.8 beats 0.6 alone
    assert scores["calibration_head"]["AUROC"] == 0.75  # 0.6 is beaten, 0.9 is a tie
    assert scores["clustering_head"]["FPR95"] == 0.5  # all inside images are kept from 0.8 on; 0.85 gets in
    assert set(scores["distance"]) == {"AUROC", "FPR95", "AUPR"}


def test_every_image_is_measured_by_prototypes_of_the_other_half(randomness):
    features = torch.randn(40, 5, generator=randomness)
    outputs = build_outputs(features)
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    even, odd = (fit_prototypes(features[start::2], assignment[start::2], 2) for start in (0, 1))
    found = outlier_reference(outputs, None)
    torch.testing.assert_close(found.inside[0::2], odd.distance(features[0::2]))
    torch.testing.assert_close(found.inside[1::2], even.distance(features[1::2]))
    other = torch.randn(7, 5, generator=randomness)
    torch.testing.assert_close(found.distance(other), (even.distance(other) + odd.distance(other)) / 2)


def test_images_of_the_same_kind_are_not_told_apart_however_many_features_there_are(randomness):
    inside, outside = (torch.randn(count, 200, generator=randomness) for count in (100, 300))
    outputs = build_outputs(inside)
    fair = score_outside(outputs, build_outputs(outside), outlier_reference(outputs, None))["distance"]["AUROC"]
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    own = outlier_reference(outputs, fit_prototypes(inside, assignment, 2))
    flattering = score_outside(outputs, build_outputs(outside), own)["distance"]["AUROC"]
    assert fair == pytest.approx(0.5, abs=0.1)
    assert flattering > 0.9


def test_given_prototypes_measure_all_images(randomness):
    features = torch.randn(30, 4, generator=randomness)
    prototypes = fit_prototypes(features, torch.arange(30) % 2, 2)
    other = torch.randn(6, 4, generator=randomness)
    found = outlier_reference(build_outputs(other), prototypes)
    torch.testing.assert_close(found.inside, prototypes.distance(other))
    torch.testing.assert_close(found.distance(features), prototypes.distance(features))

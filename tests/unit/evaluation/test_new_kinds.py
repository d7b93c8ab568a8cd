import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.evaluation import new_kinds
from cdc_plugin.evaluation.predict import FEATURES, Prediction, PredictionPart
from cdc_plugin.evaluation.records import compute_outlier_columns, concatenate_tables

CENTERS = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


def draw(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    kind = kind[torch.randperm(len(kind), generator=torch.Generator().manual_seed(2))]
    noise = torch.randn(len(kind), 16, generator=torch.Generator().manual_seed(3))
    return CENTERS[kind] + 0.3 * noise, kind


@pytest.fixture
def prototypes():
    return fit_prototypes(*draw([60] * 4), 4)


def prediction_of(features: torch.Tensor, prototypes, part_sizes: list[int]) -> Prediction:
    parts, start = [], 0
    for size in part_sizes:
        block = features[start : start + size]
        columns = {**compute_outlier_columns(prototypes, block), FEATURES: block.half().numpy()}
        columns["confidence"] = np.ones(len(block), np.float32)
        parts.append(PredictionPart(np.arange(start, start + len(block)), columns if len(block) else {}, []))
        start += size
    return Prediction(parts, [str(number) for number in range(len(features))], "array", {})


def test_kinds_do_not_depend_on_the_parts_and_features_are_not_in_the_table(prototypes):
    features, truth = draw([30] * 4 + [25, 40])
    found = prediction_of(features, prototypes, [len(features)])
    kinds = new_kinds.find_new_kinds(found, prototypes, 0)
    assert kinds.sizes == sorted(kinds.sizes, reverse=True)
    assert [set(truth[kinds.kind == number].tolist()) for number in (0, 1)] == [{5}, {4}]
    assert ((kinds.kind < 0) == (truth < 4).numpy()).mean() > 0.97
    several = prediction_of(features, prototypes, [50, 0, 100, 35])
    assert (new_kinds.find_new_kinds(several, prototypes, 0).kind == kinds.kind).all()
    table = concatenate_tables(found.tables(new_kind=kinds.kind))
    assert table.dtype.names == ("index", "distance", "outlier", "confidence", "new_kind")


def test_of_many_images_a_sample_is_looked_at_and_all_are_assigned(prototypes, monkeypatch):
    features, truth = draw([200] * 4 + [60])
    monkeypatch.setattr(new_kinds, "SAMPLE", 200)
    found = prediction_of(features, prototypes, [300, 300, 260])
    assert len(new_kinds._sample_features(found)) <= 200
    kinds = new_kinds.find_new_kinds(found, prototypes, 0)
    assert ((kinds.kind == 0) == (truth == 4).numpy()).mean() > 0.97
    assert "60 new" not in kinds.describe()
    assert f"of {kinds.sizes[0]}" in kinds.describe()


def test_without_new_kinds_one_line_says_so(prototypes):
    features, _ = draw([60] * 4)
    assert (
        "no new kind" in new_kinds.find_new_kinds(prediction_of(features, prototypes, [240]), prototypes, 0).describe()
    )

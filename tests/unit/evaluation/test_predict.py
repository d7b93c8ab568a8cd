from dataclasses import replace

import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import predict as prediction
from cdc_plugin.evaluation.outputs import predict
from cdc_plugin.evaluation.predict import predict_images
from cdc_plugin.evaluation.prediction_table import prediction_table
from cdc_plugin.training.features import extract_features

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_clusterer):
    return tiny_clusterer


@pytest.fixture
def photos(tmp_path, digits, write_images):
    return write_images(tmp_path / "photos", digits[0][:30], digits[1][:30])


@pytest.mark.parametrize("batch_size", [1, 7, 30, 256])
def test_the_table_is_that_of_all_images_at_once(model, photos, batch_size):
    found = predict_images(model, photos, CPU, batch_size)
    images = open_images(photos, 32)
    clustering, calibration, _ = predict(model, images, CPU, "float32", None)
    expected = prediction_table(images.names, clustering, calibration)
    assert found.table.dtype.names == expected.dtype.names
    for name in ("path", "cluster", "second_cluster"):
        assert found.table[name].tolist() == expected[name].tolist()
    for name in ("confidence", "clustering_confidence", "second_confidence"):
        np.testing.assert_allclose(found.table[name], expected[name], atol=1e-6)
    assert found.places.tolist() == list(range(30))
    assert found.source == str(photos)


def test_images_that_cannot_be_read_are_named_and_have_no_row(model, photos):
    broken = sorted(photos.rglob("*.png"))[4]
    broken.write_bytes(b"x")
    found = predict_images(model, photos, CPU, 8)
    assert [name for name, _ in found.skipped] == [broken.relative_to(photos).as_posix()]
    assert len(found.table) == 29
    assert 4 not in found.places


def test_images_to_look_at_first_may_be_unreadable_one_and_all(model, photos, monkeypatch):
    for path in sorted(photos.rglob("*.png"))[::29]:
        path.write_bytes(b"x")
    monkeypatch.setattr(prediction, "GLANCE", 2)  # the first and the last
    assert len(predict_images(model, photos, CPU).table) == 28


def test_labels_change_nothing(model, tmp_path, digits):
    np.savez(tmp_path / "with.npz", x=digits[0][:10], y=digits[1][:10])
    np.savez(tmp_path / "without.npz", x=digits[0][:10])
    tables = [predict_images(model, tmp_path / name, CPU).table for name in ("with.npz", "without.npz")]
    assert (tables[0] == tables[1]).all()


def test_a_model_with_prototypes_flags_images_beyond_their_limit(model, digits):
    images = open_images(digits[0], 32)
    features = extract_features(model.backbone, images, CPU, "float32", None)
    prototypes = fit_prototypes(features, torch.from_numpy(digits[1]), 10)
    distances = prototypes.distance(features)
    model.prototypes = replace(prototypes, limit=float(distances[:50].median()))
    table = predict_images(model, digits[0][:50], CPU, 16).table
    assert table.dtype.names[-2:] == ("distance", "outlier")
    np.testing.assert_allclose(table["distance"], distances[:50], rtol=1e-3)
    assert (table["outlier"] == (table["distance"] > model.prototypes.limit)).all()
    assert 20 <= table["outlier"].sum() <= 30


def test_facts_that_a_checkpoint_leaves_open_are_settled_on_a_sample_of_the_images(model, digits, monkeypatch):
    seen = []
    monkeypatch.setattr(prediction, "resolve_input", lambda backbone, images: seen.append(images) or backbone)
    predict_images(model, digits[0], CPU)
    model.backbone.inferred = ("mean", "std")
    predict_images(model, digits[0], CPU)
    assert [len(images) for images in seen] == [64, 200]
    assert (seen[0].images[-1] == digits[0][-1]).all()


def test_a_model_that_computes_nonsense_is_refused(model, digits):
    model.calibration_head[-1].bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        predict_images(model, digits[0][:4], CPU)


def test_too_many_images_at_once_for_the_memory_are_told_with_the_way_out(model, digits, monkeypatch):
    def full(*_arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prediction, "_columns", full)
    with pytest.raises(UserError, match="smaller --batch-size"):
        predict_images(model, digits[0][:4], CPU)

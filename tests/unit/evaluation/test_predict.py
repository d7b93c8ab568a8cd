from dataclasses import replace

import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.data import stream
from cdc_plugin.data.images import open_images
from cdc_plugin.data.side import Side
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import predict as prediction
from cdc_plugin.evaluation.records import build_prediction_table
from cdc_plugin.training.features import extract_features, head_probabilities
from cdc_plugin.training.runtime import Runtime
from tests.helpers.predictions import predict_at_once, table_of

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path, digits, write_images):
    return write_images(tmp_path / "photos", digits[0][:30], digits[1][:30])


@pytest.mark.parametrize("batch_size", [1, 7, 30, 256])
def test_the_table_is_that_of_all_images_at_once(tiny_clusterer, photos, batch_size):
    found = predict_at_once(tiny_clusterer, photos, batch_size)
    images = open_images(photos, 32)
    features = extract_features(tiny_clusterer.backbone, images, Runtime(CPU))
    heads = tiny_clusterer.clustering_head, tiny_clusterer.calibration_head
    clustering, calibration = (head_probabilities(head, features) for head in heads)
    expected = build_prediction_table(images.names, clustering, calibration)
    table = table_of(found)
    assert table.dtype.names == expected.dtype.names
    for name in ("path", "cluster", "second_cluster"):
        assert table[name].tolist() == expected[name].tolist()
    for name in ("confidence", "clustering_confidence", "second_confidence"):
        np.testing.assert_allclose(table[name], expected[name], atol=1e-6)
    assert found.positions.tolist() == list(range(30))
    assert found.source == str(photos)


def test_images_that_cannot_be_read_are_named_and_have_no_row(tiny_clusterer, photos, monkeypatch):
    broken = sorted(photos.rglob("*.png"))[4]
    broken.write_bytes(b"x")
    found = predict_at_once(tiny_clusterer, photos, 8)
    assert [name for name, _ in found.skipped] == [broken.relative_to(photos).as_posix()]
    assert len(table_of(found)) == 29
    assert 4 not in found.positions
    for path in sorted(photos.rglob("*.png"))[::29]:
        path.write_bytes(b"x")
    monkeypatch.setattr(prediction, "CHECK_COUNT", 2)  # the first and the last: nothing can be examined beforehand
    assert len(table_of(predict_at_once(tiny_clusterer, photos))) == 27


def test_copies_and_files_that_are_no_images_are_named(tiny_clusterer, photos):
    first, *others = sorted(photos.rglob("*.png"))
    others[-1].write_bytes(first.read_bytes())
    (photos / "a.mp4").touch()
    found = predict_at_once(tiny_clusterer, photos, 8)
    assert [(warning["kind"], warning["count"]) for warning in found.warnings] == [("left_aside", 1), ("copies", 1)]
    assert "marks" not in table_of(found).dtype.names


def test_labels_change_nothing(tiny_clusterer, tmp_path, digits):
    np.savez(tmp_path / "with.npz", x=digits[0][:10], y=digits[1][:10])
    np.savez(tmp_path / "without.npz", x=digits[0][:10])
    tables = [table_of(predict_at_once(tiny_clusterer, tmp_path / name)) for name in ("with.npz", "without.npz")]
    assert (tables[0] == tables[1]).all()


def test_a_model_with_prototypes_flags_images_beyond_their_limit(tiny_clusterer, digits):
    images = open_images(digits[0], 32)
    features = extract_features(tiny_clusterer.backbone, images, Runtime(CPU))
    prototypes = fit_prototypes(features, torch.from_numpy(digits[1]), 10)
    distances = prototypes.distance(features)
    tiny_clusterer.prototypes = replace(prototypes, limit=float(distances[:50].median()))
    table = table_of(predict_at_once(tiny_clusterer, digits[0][:50], 16))
    assert table.dtype.names[-2:] == ("distance", "outlier")
    np.testing.assert_allclose(table["distance"], distances[:50], rtol=1e-3)
    assert (table["outlier"] == (table["distance"] > tiny_clusterer.prototypes.limit)).all()
    assert 20 <= table["outlier"].sum() <= 30


def test_open_facts_about_the_input_are_inferred_from_a_sample_of_the_images(tiny_clusterer, digits, monkeypatch):
    seen = []
    monkeypatch.setattr(prediction, "resolve_input", lambda backbone, images: seen.append(images) or backbone)
    predict_at_once(tiny_clusterer, digits[0])
    tiny_clusterer.backbone.inferred = ("mean", "std")
    predict_at_once(tiny_clusterer, digits[0])
    assert [len(images) for images in seen] == [64, 200]
    assert (seen[0].images[-1] == digits[0][-1]).all()


def test_memory_is_bounded_where_larger_squares_are_kept_than_the_network_sees(tiny_clusterer, digits, monkeypatch):
    tiny_clusterer.backbone.input_size = Side(32, 128, "bicubic")
    with pytest.raises(UserError, match="at most 4 times"):
        Side(32, 2048)
    monkeypatch.setattr(prediction, "LARGEST_BATCH", 5 * 3 * 128**2)
    read = []
    resize = stream.squares_from_array
    monkeypatch.setattr(stream, "squares_from_array", lambda some, side: read.append(len(some)) or resize(some, side))
    predict_at_once(tiny_clusterer, digits[0][:23])
    assert max(read) == 5


def test_out_of_memory_names_a_smaller_batch_size(tiny_clusterer, digits, monkeypatch):
    def full(*_arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prediction, "_compute_columns", full)
    with pytest.raises(UserError, match=r"batch_size=128"):
        predict_at_once(tiny_clusterer, digits[0][:4])

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from cdc_plugin.checkpoints.load import load_backbone, load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.core.hierarchy import Hierarchy
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead, CosineHead, LayeredHead


@pytest.fixture
def model(tiny_clusterer):
    return tiny_clusterer


def test_a_saved_model_is_loaded_with_identical_logits(model, tmp_path, digits):
    model.save(tmp_path, {"seed": 4})
    again = load_model(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    images = torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
        features = model.backbone(images)
        assert torch.equal(again.clustering_head(features), model.clustering_head(features))
    assert not again.training
    assert again.clusters == 5
    assert np.array_equal(again.predict_proba(digits[0][:9]), model.predict_proba(digits[0][:9]))
    assert json.loads((tmp_path / "model.json").read_text())["provenance"] == {"seed": 4}
    before = (tmp_path / "model.safetensors").read_bytes()
    again.save(tmp_path, {})
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_result_folder_serves_as_backbone_of_the_next_run(model, tmp_path):
    model.save(tmp_path, {})
    backbone = load_backbone(tmp_path).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(backbone(images), model.backbone(images))
    torch.testing.assert_close(backbone.mean, model.backbone.mean)
    assert backbone.input_size == 32


def test_probabilities_are_those_of_the_calibration_head_on_plain_views(model, digits):
    pixels = torch.from_numpy(digits[0][:7]).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = F.softmax(model(plain_view(pixels, view_settings(model.backbone))), dim=1)
    found = model.predict_proba(digits[0][:7], batch_size=3)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)


def test_images_come_as_arrays_pictures_paths_or_lists_of_them(model, digits, tmp_path, write_images):
    pixels = digits[0][:4]
    folder = write_images(tmp_path / "new images", pixels)
    files = sorted(folder.iterdir())
    expected = model.predict_proba(pixels)
    assert expected.shape == (4, 5)
    pictures = [Image.fromarray(image) for image in pixels]
    for given in (list(pixels), pictures, tuple(pictures), files, [str(file) for file in files], folder, str(folder)):
        np.testing.assert_allclose(model.predict_proba(given), expected, atol=1e-6)
    for one in (pixels[0], pictures[0], files[0], str(files[0]), pixels[0][..., 0], [pictures[0]]):
        np.testing.assert_allclose(model.predict_proba(one), expected[:1], atol=1e-6)


def test_prediction_leaves_no_trace_in_the_model(model, digits):
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.predict_proba(digits[0][:10])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("given", [[], 3.5, None, "nowhere/at/all.png"])
def test_what_is_no_image_is_refused_and_a_file_that_cannot_be_read_named(model, given, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(UserError):
        model.predict_proba(given)
    with pytest.raises(UserError, match=r"broken\.png"):
        model.predict_proba(tmp_path)


def test_a_network_of_the_users_own_is_saved_but_says_that_it_cannot_be_rebuilt(tmp_path):
    backbone = Backbone(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4)), 4, [0.5] * 3, [0.5] * 3, 8)
    model = Clusterer(backbone, ClusterHead(4, 6, 2), ClusterHead(4, 6, 2))
    model.save(tmp_path, {})
    with pytest.raises(UserError, match="own class"):
        load_model(tmp_path)


def test_folders_that_hold_no_whole_model_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="no result folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(UserError, match="expected a checkpoint in the folder"):
        load_model(tmp_path)
    model.save(tmp_path, {})
    text = (tmp_path / "model.json").read_text()
    other = {"kind": "mlp", "hidden": 12, "clusters": 6}
    absurd = [{"kind": "mlp", "hidden": size, "clusters": 6} for size in (-1, float("inf"))]
    unstated = [(heads, "does not state its heads") for heads in ({"hidden": 12}, *absurd)]
    for heads, message in (*unstated, (other, "calibration_head|clustering_head")):
        (tmp_path / "model.json").write_text(json.dumps({**json.loads(text), "heads": heads, "sha256": None}))
        with pytest.raises(UserError, match=message):
            load_model(tmp_path)
    (tmp_path / "model.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CosineHead([["linear", 8, 5], ["batchnorm", 5], ["relu"], ["linear", 5, 4]], 4, 3, 0.05),
        lambda: LayeredHead([["linear", 8, 5], ["relu"], ["linear", 5, 3]]),
    ],
)
def test_a_model_with_the_heads_of_another_method_is_saved_and_loaded(tiny_backbone, tmp_path, make):
    model = Clusterer(tiny_backbone, make(), make()).eval()
    model.save(tmp_path, {})
    images = torch.randn(4, 3, 32, 32)
    again = load_model(tmp_path)
    assert torch.equal(again(images), model(images))
    assert again.clusters == 3
    backbone = load_checkpoint(tmp_path)
    assert torch.equal(backbone.heads[0].eval()(again.backbone(images)), model.clustering_head(model.backbone(images)))


LEVELS = Hierarchy(((1, 3), (0, 4), (0, 1), (0, 2)), (0.1, 0.25, 0.5, 0.75))


def test_a_level_sums_the_probabilities_of_its_clusters(tiny_clusterer, digits):
    with pytest.raises(UserError, match="cdc-refine"):
        tiny_clusterer.predict_proba(digits[0][:3], level=2)
    tiny_clusterer.hierarchy = LEVELS
    leaves = tiny_clusterer.predict_proba(digits[0][:20])
    found = tiny_clusterer.predict_proba(digits[0][:20], level=3)
    expected = np.stack([leaves[:, [0, 4]].sum(1), leaves[:, [1, 3]].sum(1), leaves[:, 2]], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(tiny_clusterer.predict_proba(digits[0][:20], level=5), leaves)
    with pytest.raises(UserError, match="level=6"):
        tiny_clusterer.predict_proba(digits[0][:3], level=6)


def test_a_hierarchy_is_saved_and_an_edited_one_is_refused(tiny_clusterer, tmp_path):
    tiny_clusterer.hierarchy = LEVELS
    tiny_clusterer.save(tmp_path, {})
    assert load_model(tmp_path).hierarchy == LEVELS
    stated = json.loads((tmp_path / "model.json").read_text())
    stated["hierarchy"]["merges"][0] = [2, 3]
    (tmp_path / "model.json").write_text(json.dumps(stated))
    with pytest.raises(UserError, match="changed"):
        load_model(tmp_path)
    stated["hierarchy"]["merges"][0] = [3, 3]
    (tmp_path / "model.json").write_text(json.dumps({**stated, "sha256": None}))
    with pytest.raises(UserError, match="hierarchy"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**stated, "sha256": None, "hierarchy": None}))
    assert load_model(tmp_path).hierarchy is None

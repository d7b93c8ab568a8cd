"""The exported graph in onnxruntime: the same numbers as torch, for any network, head and number of images."""

import json
import sys

import pytest
import torch

from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.export import export_model
from cdc_plugin.integrations.export import onnx as onnx_export
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import CosineHead, LayeredHead
from tests.helpers.commands import names_in
from tests.helpers.exported_models import MEAN, STD, TEST_VIT, TINY_RESNET, OwnNetwork, mlp_head, result_folder

# One block of each kind: translating a network takes a second a block.
VIT = {**TEST_VIT, "kwargs": {**TEST_VIT["kwargs"], "depth": 1}}
CONVNEXT = {"family": "timm", "name": "test_convnext", "kwargs": {"depths": [1, 1, 1, 1]}}


@pytest.fixture
def own():
    """The network that is translated fastest."""
    return Backbone(OwnNetwork(), 5, MEAN, STD, 32)


def test_missing_onnx_packages_are_named_with_what_to_type(own, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr(onnx_export, "PACKAGES", ("onnxscript",))
    with pytest.raises(UserError, match=r"needs onnxscript; type: pip install .cdc-plugin\[onnx\]."):
        export_model(own, "onnx", tmp_path / "m.onnx")


def onnx_session(file):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


@pytest.fixture
def _onnx():
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")


def cosine_head(feature_dim):
    """As a retrofitted SeCu model has it."""
    return CosineHead([["linear", feature_dim, 5], ["batchnorm", 5], ["relu"]], 5, 4, 0.05)


def layered_head(feature_dim):
    """As a retrofitted model with a head of its own shape has it."""
    return LayeredHead([["normalize"], ["linear", feature_dim, 5], ["relu"], ["linear", 5, 4, False]])


@pytest.mark.usefixtures("_onnx")
@pytest.mark.parametrize(
    ("spec", "make_head"),
    [(TINY_RESNET, mlp_head), (VIT, cosine_head), (CONVNEXT, layered_head)],
    ids=["resnet", "vit, cosine head", "convnext, layered head"],
)
def test_onnx_export_predicts_for_any_network_head_and_number_of_images(spec, make_head, tmp_path):
    import onnx

    model = load_model(result_folder(tmp_path / "run", spec, make_head))
    export_model(tmp_path / "run", "onnx", tmp_path / "m.onnx")
    session = onnx_session(tmp_path / "m.onnx")
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        wanted = model((pixels - mean) / std).softmax(dim=1)
        wanted_features = model.backbone((pixels - mean) / std)
    for count in (1, 5):
        probabilities, found = session.run(["probabilities", "features"], {"images": pixels[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(probabilities), wanted[:count], rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(found), wanted_features[:count], rtol=0, atol=1e-4)
    (images,) = session.get_inputs()  # the batch is of any size
    assert (images.name, images.type, images.shape[1:]) == ("images", "tensor(float)", [3, 32, 32])
    assert isinstance(images.shape[0], str)
    assert [output.name for output in session.get_outputs()] == ["probabilities", "features"]
    facts = session.get_modelmeta().custom_metadata_map
    assert (json.loads(facts["mean"]), facts["clusters"], facts["input_size"]) == (MEAN, "4", "32")
    assert onnx.load(str(tmp_path / "m.onnx")).opset_import[0].version == onnx_export.OPSET
    assert names_in(tmp_path) == {"m.onnx", "run"}


@pytest.mark.usefixtures("_onnx")
def test_users_own_class_can_become_a_graph_of_features(own, tmp_path):
    written = export_model(own, "onnx", tmp_path / "own.onnx")
    assert [output.name for output in onnx_session(tmp_path / "own.onnx").get_outputs()] == ["features"]
    assert any("returns features" in note for note in written.notes)


@pytest.mark.usefixtures("_onnx")
def test_graph_that_computes_something_else_is_not_kept(own, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match="nothing was written"):
        export_model(own, "onnx", tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []

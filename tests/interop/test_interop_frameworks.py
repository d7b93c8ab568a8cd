"""Checkpoints that clustering methods, lightly, timm and torchvision wrote, against what their own code computes."""

import json

import pytest
import torch

from cdc_plugin.checkpoints import infer_input, load_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers.checkpoint_builders.genuine import (
    assert_features,
    assert_statistics,
    needs_shared,
    original_images,
    unpack,
)

pytestmark = needs_shared
CASES = {
    **{"scan-pretext-model": "scan", "scan-scan-model": "scan", "scan-selflabel-model": "scan", "secu-entropy": "secu"},
    **{"spice-self-select": "spice-self", "cc": "cc", "cdc-official-checkpoint": "cdc"},
    **{"lightly-simsiam-r18-seq": "lightly", "lightly-simsiam-timm-r18": "lightly"},
    **{"timm-convnext_atto-train": "timm", "timm-test_resnet": "timm", "torchvision-resnet18": "torchvision"},
}


@pytest.mark.parametrize("case", CASES)
def test_features_logits_and_input_are_those_of_the_framework_itself(tmp_path, case):
    path, record, expected = unpack(case, tmp_path)
    loaded = load_checkpoint(path)
    backbone = loaded.backbone
    assert (loaded.format, loaded.matched, backbone.feature_dim) == (CASES[case], 1.0, record["feature_dim"])
    assert_statistics(backbone, record)
    bare = loaded.format in ("lightly", "timm", "torchvision")
    assert backbone.input_size == record["input_size"] or (bare and "input_size" in backbone.inferred)
    assert_features(backbone, expected)
    names = [name for name in ("logits", "logits_cali") if name in expected]
    for head, name in zip(loaded.heads, names, strict=True):
        with torch.no_grad():
            logits = head.eval()(backbone(expected["inputs"]))
        torch.testing.assert_close(logits, expected[name], rtol=1e-4, atol=1e-4)
        probs = expected[name.replace("logits", "probs")]
        torch.testing.assert_close(logits.softmax(dim=1), probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["scan-scan-model", "secu-entropy", "spice-self-select"])
def test_images_confirm_that_networks_for_cifar_have_no_pool(tmp_path, case):
    path, record, expected = unpack(case, tmp_path)
    found = infer_input(load_checkpoint(path).backbone, original_images(record, expected))
    assert found.backbone.spec["stem"]["pool"] is False
    assert_features(found.backbone, expected)


def test_training_run_of_timm_states_its_image_size(tmp_path):
    path, record, _ = unpack("timm-convnext_atto-train", tmp_path)
    assert load_checkpoint(path).backbone.input_size == record["input_size"]


def test_model_of_timm_is_told_without_its_file_name(tmp_path):
    path, _, expected = unpack("timm-test_resnet", tmp_path)
    backbone = load_checkpoint(path.rename(tmp_path / "weights.pth")).backbone
    assert backbone.spec["name"] == "test_resnet"
    assert_features(backbone, expected)


def test_backbone_of_lightly_is_built_again_from_its_spec(tmp_path):
    path, _, expected = unpack("lightly-simsiam-r18-seq", tmp_path)
    backbone = load_checkpoint(path).backbone
    network, _ = build(json.loads(json.dumps(backbone.spec)))
    network.load_state_dict(backbone.module.state_dict())
    assert_features(network, expected)


def test_weights_missing_or_misshapen_inside_the_backbone_are_refused(tmp_path):
    path, *_ = unpack("lightly-simsiam-r18-seq", tmp_path)
    payload = torch.load(path)
    for name in ("backbone.0.weight", "backbone.1.running_mean", "backbone.6.1.conv2.weight", "backbone.7.0.bn1.bias"):
        for change in (None, payload["state_dict"][name][:2]):
            state = {key: change if key == name else value for key, value in payload["state_dict"].items()}
            state = {key: value for key, value in state.items() if value is not None}
            torch.save(payload | {"state_dict": state}, tmp_path / "changed.ckpt")
            with pytest.raises(UserError):
                load_checkpoint(tmp_path / "changed.ckpt")

"""Checkpoints that clustering methods, lightly, timm and torchvision wrote, against what their own code computes."""

import pytest
import torch

from cdc_plugin.checkpoints import infer_input, load_checkpoint
from tests.helpers.checkpoint_builders.genuine import assert_facts, assert_features, needs_shared, raw_images, unpack

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
    assert loaded.format == CASES[case]
    assert_facts(loaded, record, expected)
    bare = loaded.format in ("lightly", "timm", "torchvision") and not case.endswith("-train")
    assert backbone.input_size == record["input_size"] or (bare and "input_size" in backbone.inferred)
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
    found = infer_input(load_checkpoint(path).backbone, raw_images(record, expected))
    assert found.backbone.spec["stem"]["pool"] is False
    assert_features(found.backbone, expected)


def test_model_of_timm_is_told_without_its_file_name(tmp_path):
    path, _, expected = unpack("timm-test_resnet", tmp_path)
    backbone = load_checkpoint(path.rename(tmp_path / "weights.pth")).backbone
    assert backbone.spec["name"] == "test_resnet"
    assert_features(backbone, expected)

"""Genuine checkpoints in, exports out: the other library must compute what the checkpoint's own framework computed."""

import json

import pytest
import timm
import torch
from torch import nn

from cdc_plugin.checkpoints import load_backbone, load_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.export import export_model
from cdc_plugin.integrations.export import onnx as onnx_export
from tests.helpers.checkpoint_builders.genuine import assert_features, needs_shared, unpack

pytestmark = needs_shared
SOLO_CASES = [
    ("solo-mocov2plus-r18-cifar", "resnet18", "base"),
    ("solo-byol-r18-224", "resnet18", "base"),
    ("solo-simclr-wrn-adamw", "wide_resnet28w2", "base"),
    ("solo-mae-vit_tiny", "vit_tiny", "mae"),
]


def linear_evaluation(folder):
    """The backbone as solo-learn's ``main_linear.py`` makes it, of solo-learn's own networks, loaded strictly."""
    base = pytest.importorskip("solo.methods.base", reason="solo-learn is not on the path")
    arguments = json.loads((folder / "args.json").read_text())
    name = arguments["backbone"]["name"]
    backbone = base.BaseMethod._BACKBONES[name](method=arguments["method"], **arguments["backbone"]["kwargs"])
    if name.startswith("resnet"):
        backbone.fc = nn.Identity()
        if arguments["data"]["dataset"] in ("cifar10", "cifar100"):
            backbone.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=2, bias=False)
            backbone.maxpool = nn.Identity()
    (file,) = folder.glob("*.ckpt")
    state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    backbone.load_state_dict({key.replace("backbone.", ""): value for key, value in state.items()})
    return backbone


@pytest.mark.parametrize(("case", "name", "method"), SOLO_CASES)
def test_runs_of_solo_learn_go_back_as_the_network_they_were(tmp_path, case, name, method):
    path, record, expected = unpack(case, tmp_path / "in")
    written = export_model(path, "solo-learn", tmp_path / "out")
    assert written.network == name
    assert f"pretrain_method={method} " in written.load[0]
    assert_features(load_backbone(tmp_path / "out"), expected)
    read = load_checkpoint(tmp_path / "out", format="solo-learn").backbone
    assert_features(read, expected)
    assert read.mean.tolist() == pytest.approx(record["mean"])


@pytest.mark.parametrize("case", [case for case, *_ in SOLO_CASES])
def test_linear_evaluation_of_solo_learn_itself_computes_the_same(tmp_path, case):
    pytest.importorskip("solo.methods.base", reason="solo-learn is not on the path")
    path, _, expected = unpack(case, tmp_path / "in")
    export_model(path, "solo-learn", tmp_path / "out")
    assert_features(linear_evaluation(tmp_path / "out"), expected)


def test_stem_that_solo_learn_does_not_have_goes_to_torchvision_with_the_lines_that_rebuild_it(tmp_path):
    path, _, expected = unpack("cdcfork-mocov2plus-r34-cifar", tmp_path / "in")
    with pytest.raises(UserError, match=r"solo-learn has no network that computes .*ResNet-34.*padding 1"):
        export_model(path, "solo-learn", tmp_path / "out")
    written = export_model(path, "torchvision", tmp_path / "resnet34.pth")
    names = {}
    exec("\n".join(written.load), names)
    assert_features(names["model"], expected)
    assert_features(load_backbone(tmp_path / "resnet34.pth"), expected)


@pytest.mark.parametrize("case", ["timm-convnext_atto-train", "torchvision-resnet18", "solo-mae-vit_tiny"])
def test_timm_loads_what_it_can_build(tmp_path, case):
    path, record, expected = unpack(case, tmp_path / "in")
    export_model(path, "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert_features(model, expected)
    assert list(timm.data.resolve_model_data_config(model)["mean"]) == pytest.approx(record["mean"])
    (tmp_path / "out" / "model.json").unlink()
    assert_features(load_backbone(tmp_path / "out"), expected)


@pytest.mark.parametrize("case", ["cc", "cdc-official-checkpoint"])
def test_onnx_export_gives_the_probabilities_of_the_calibrated_or_the_only_head(tmp_path, case):
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    import onnxruntime

    path, record, expected = unpack(case, tmp_path / "in")
    export_model(path, "onnx", tmp_path / "m.onnx")
    mean, std = (torch.tensor(record[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    images = (expected["inputs"] * std + mean).numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    probabilities, features = session.run(["probabilities", "features"], {"images": images})
    wanted = expected["probs_cali"] if "probs_cali" in expected else expected["probs"]
    torch.testing.assert_close(torch.from_numpy(probabilities), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(features), expected["features"], rtol=1e-4, atol=1e-4)


def test_network_whose_pool_only_images_can_settle_is_not_exported(tmp_path):
    path, _, _ = unpack("scan-scan-model", tmp_path / "in")
    with pytest.raises(UserError, match=r"does not state its stem's pool.*run cdc-refine on it"):
        export_model(path, "onnx", tmp_path / "m.onnx")

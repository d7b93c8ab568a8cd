"""Exports are fed back through the libraries they are for, and through our own loader."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision import models

from cdc_plugin.checkpoints import load_backbone, load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.cli.export import TARGETS, export_command
from cdc_plugin.errors import UserError
from cdc_plugin.integrations import export as exports
from cdc_plugin.integrations.export import export_model
from cdc_plugin.integrations.export.torchvision import write_loading_code
from cdc_plugin.models.backbone import Backbone
from tests.helpers.exported_models import (
    IMAGES,
    MEAN,
    RESNET18,
    SHUFFLENET,
    SMALL_RESNET18,
    SMALL_STEM,
    STD,
    TEST_VIT,
    TINY_RESNET,
    OwnNetwork,
    clusterer,
    result_folder,
)


@torch.no_grad()
def features(network):
    return network.eval()(IMAGES)


def run_lines(lines):
    """What the lines of code that an export prints make of ``model``."""
    names = {}
    exec("\n".join(lines), names)
    return names["model"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Result folders by the name of their network."""
    folder = tmp_path_factory.mktemp("runs")
    specs = {"resnet": SMALL_RESNET18, "vit": TEST_VIT, "shufflenet": SHUFFLENET}
    return {name: result_folder(folder / name, spec) for name, spec in specs.items()}


def test_timm_loads_the_folder_in_each_of_its_three_ways(tmp_path):
    model = clusterer(RESNET18)
    written = export_model(model, "timm", tmp_path / "out")
    file = str(tmp_path / "out" / "model.safetensors")
    overlay = {"file": file}
    for network in (
        run_lines(written.load),
        timm.create_model("resnet18", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0),
        timm.create_model("resnet18", checkpoint_path=file, num_classes=0),
    ):
        assert torch.equal(features(network), features(model.backbone))


def test_timm_learns_what_no_weight_shows_and_gives_the_backbone_a_new_classifier(runs, tmp_path):
    vit = runs["vit"]
    written = export_model(vit, "timm", tmp_path / "out")
    network = run_lines(written.load)
    assert torch.equal(features(network), features(load_model(vit).backbone))
    assert written.network == "test_vit"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_args"] == {**TEST_VIT["kwargs"], "num_classes": 0}
    wanted = timm.data.resolve_model_data_config(network)
    assert (list(wanted["mean"]), list(wanted["std"])) == (MEAN, STD)
    assert (list(wanted["input_size"]), wanted["crop_pct"]) == ([3, 32, 32], 1.0)
    classifier = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=7)
    assert classifier.eval()(IMAGES).shape == (3, 7)
    kept = load_file(vit / "model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, kept[f"backbone.{name}"])
    (tmp_path / "out" / "model.json").unlink()  # without our description it is still read
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.format == "timm"
    assert torch.equal(features(loaded.backbone), features(network))
    assert loaded.backbone.mean.tolist() == pytest.approx(MEAN)


@pytest.mark.parametrize(
    ("spec", "name"), [(RESNET18, "resnet18"), (SMALL_RESNET18, "resnet18"), (SHUFFLENET, "shufflenet_v2_x0_5")]
)
def test_the_printed_lines_load_the_state_dict_into_torchvision(spec, name, tmp_path):
    model = clusterer(spec)
    written = export_model(model, "torchvision", tmp_path / "network.pth")
    assert written.network == name
    assert torch.equal(features(run_lines(written.load)), features(model.backbone))
    assert bool(written.notes) == ("stem" in spec)


@pytest.mark.parametrize("stem", [{}, {"padding": 2}, {"pool": True}, {"stride": 2}])
def test_every_part_of_an_unusual_stem_is_in_the_lines(stem):
    lines = write_loading_code("resnet18", {**RESNET18, "stem": {**SMALL_STEM, "padding": 1, **stem}}, Path("r.pth"))
    stride, padding = stem.get("stride", 1), stem.get("padding", 1)
    assert f"model.conv1 = torch.nn.Conv2d(3, 64, 3, stride={stride}, padding={padding}, bias=False)" in lines
    assert ("model.maxpool = torch.nn.Identity()" in lines) is not stem.get("pool", False)


@pytest.mark.parametrize(
    ("spec", "to", "file"),
    [
        (TEST_VIT, "timm", "out"),
        (SHUFFLENET, "torchvision", "r.pth"),
        (SMALL_RESNET18, "torchvision", "r.pth"),
        (SMALL_RESNET18, "solo-learn", "out"),
    ],
)
def test_our_loader_reads_an_export_back_exactly(spec, to, file, tmp_path):
    model = clusterer(spec)
    export_model(model, to, tmp_path / file)
    back = load_backbone(tmp_path / file)
    assert torch.equal(features(back), features(model.backbone))
    assert back.mean.tolist() == pytest.approx(MEAN)
    assert back.std.tolist() == pytest.approx(STD)
    assert (back.input_size, back.inferred) == (32, ())


def test_weights_that_lie_beside_an_export_are_not_taken_for_it(runs, tiny_checkpoint, tmp_path):
    export_model(runs["shufflenet"], "torchvision", tmp_path / "model.pth")
    (tmp_path / "other.pt").write_bytes(tiny_checkpoint.read_bytes())
    assert load_checkpoint(tmp_path / "other.pt").format == "torchvision"
    assert load_backbone(tmp_path / "other.pt").feature_dim == 8
    assert load_checkpoint(tmp_path / "model.pth").format == "native"


@pytest.mark.parametrize("spec", [SMALL_RESNET18, RESNET18])
def test_solo_learn_gets_a_run_folder_with_the_names_it_expects(spec, tmp_path):
    model = clusterer(spec)
    written = export_model(model, "solo-learn", tmp_path / "run")
    small = "stem" in spec
    payload = torch.load(written.files[0], weights_only=True)
    arguments = json.loads((tmp_path / "run" / "args.json").read_text())
    assert written.files[0].name == "cdc-resnet18-ep=0.ckpt"
    assert arguments["backbone"] == {"name": "resnet18", "kwargs": {}}
    assert arguments["data"]["dataset"] == ("cifar10" if small else "custom")
    assert f"data.dataset={arguments['data']['dataset']}" in written.load[0]
    # The network that solo-learn's linear evaluation builds.
    network = models.resnet18()
    network.fc = nn.Identity()
    if small:
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=2, bias=False)
        network.maxpool = nn.Identity()
    network.load_state_dict({key.removeprefix("backbone."): value for key, value in payload["state_dict"].items()})
    assert torch.equal(features(network), features(model.backbone))


def test_epochs_are_in_the_name_and_a_repeated_export_leaves_one_checkpoint(runs, tmp_path):
    export_model(clusterer(SMALL_RESNET18), "solo-learn", tmp_path / "run")
    export_model(runs["resnet"], "solo-learn", tmp_path / "run", overwrite=True)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["args.json", "cdc-resnet18-ep=3.ckpt", "cdc-resnet18-ep=3.json"]


def test_heads_of_attention_decide_which_of_its_transformers_solo_learn_builds(tmp_path):
    spec = {"family": "timm", "name": "vit_tiny_patch16_224", "kwargs": {"img_size": 32, "patch_size": 8, "depth": 12}}
    for heads, method in ((3, "base"), (12, "mae")):
        model = clusterer({**spec, "kwargs": {**spec["kwargs"], "num_heads": heads}})
        model.backbone.module.pos_embed.data[:, 0] = 0  # as the fixed embeddings of mae have it
        written = export_model(model, "solo-learn", tmp_path / method)
        assert f"pretrain_method={method}" in written.load[0]
        arguments = json.loads((tmp_path / method / "args.json").read_text())
        assert arguments["backbone"] == {"name": "vit_tiny", "kwargs": {"patch_size": 8, "img_size": 32}}


def test_padding_that_solo_learn_would_not_have_is_refused(tmp_path):
    model = clusterer({**RESNET18, "stem": {**SMALL_STEM, "padding": 1}})
    with pytest.raises(UserError, match=r"padding 2 and no max-pool, the model is ResNet-18.* padding 1") as refusal:
        export_model(model, "solo-learn", tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("to", "spec", "reason"),
    [
        *((to, TINY_RESNET, r"widths 8/8/8/8.*to='onnx'") for to in ("solo-learn", "timm", "torchvision")),
        ("timm", SMALL_RESNET18, "stem 3x3.*to='torchvision'"),
        ("solo-learn", {**SMALL_RESNET18, "depths": [3, 4, 6, 3]}, "ResNet-34"),
    ],
)
def test_networks_that_a_library_does_not_have_are_refused(to, spec, reason, tmp_path):
    out, own = tmp_path / ("r.pth" if to == "torchvision" else "out"), Backbone(OwnNetwork(), 5, MEAN, STD, 32)
    with pytest.raises(UserError, match=f"{to} has no network that computes what the model does.*{reason}"):
        export_model(clusterer(spec), to, out)
    with pytest.raises(UserError, match=r"a network of the user's own class.*onnx"):
        export_model(own, to, out)
    assert list(tmp_path.iterdir()) == []


def test_statistics_that_solo_learn_fixes_are_told(tmp_path):
    model = clusterer(SMALL_RESNET18)
    (note,) = export_model(model, "solo-learn", tmp_path / "a").notes
    assert "0.4914" in note
    assert "[0.5, 0.4, 0.3]" in note
    model.backbone.mean[:], model.backbone.std[:] = torch.tensor([[0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]])
    assert export_model(model, "solo-learn", tmp_path / "b").notes == ()


def test_a_guessed_stem_is_not_passed_on_as_a_fact_and_assumed_statistics_stay_assumed(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"does not state its stem's pool, padding, stride.*cdc-refine"):
        export_model(tiny_checkpoint, "torchvision", tmp_path / "r.pth")
    model = clusterer(SHUFFLENET)
    model.backbone.inferred = ("mean", "std")
    written = export_model(model, "torchvision", tmp_path / "out.pth")
    assert any("does not state mean, std:" in note for note in written.notes)
    assert load_backbone(tmp_path / "out.pth").inferred == ("mean", "std")


def test_nothing_is_replaced_unasked(runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    (tmp_path / "r.json").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(config.json\).*overwrite=True"):
        export_model(runs["vit"], "timm", tmp_path / "full")
    with pytest.raises(UserError, match=r"r.json already exists.*overwrite=True"):
        export_model(runs["shufflenet"], "torchvision", tmp_path / "r.pth")
    assert (tmp_path / "full" / "config.json").read_text() == (tmp_path / "r.json").read_text() == "mine"
    export_model(runs["shufflenet"], "torchvision", tmp_path / "r.pth", overwrite=True)
    assert json.loads((tmp_path / "r.json").read_text())["weights"] == "r.pth"


def test_results_of_a_run_are_never_replaced(runs):
    run = runs["shufflenet"]
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for to, out in (("timm", run), ("hub", run), ("torchvision", run / "model.pth")):
        with pytest.raises(UserError, match="is a result folder of cdc-refine"):
            export_model(run, to, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("timm", "file.txt", "is a file; give the path of a folder"),
        ("torchvision", "", r"is a folder; give the path of a file, such as .*resnet18.pth"),
        ("torchvision", "net.onnx", r"expected a .pth or .pt file"),
        ("torchvision", "none/net.pth", "there is no folder"),
        ("onnx", "net.pth", r"expected a .onnx file"),
        ("keras", "out", "solo-learn, timm, torchvision, onnx"),
    ],
)
def test_impossible_outputs_are_refused(to, out, message, runs, tmp_path):
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(UserError, match=message):
        export_model(runs["vit"], to, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_command_names_the_files_and_how_to_load_them_and_refuses_in_one_line(runs, tmp_path, capsys, refuse):
    assert tuple(exports.TARGETS) == TARGETS
    export_command(["--model", str(runs["vit"]), "--to", "timm", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "test_vit for timm" in printed.out
    assert f'timm.create_model("local-dir:{tmp_path / "out"}", pretrained=True)' in printed.out
    assert printed.err == ""
    line = refuse("export", "--model", runs["resnet"], "--to", "timm", "--out", tmp_path / "other")
    assert line.startswith("cdc-export: error: timm has no network")

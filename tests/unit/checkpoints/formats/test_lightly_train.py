"""lightly-train's exports and training checkpoints, as its own code lays them out."""

import pytest
import timm
import torch
from torch import nn

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.formats.lightly_train import read_module_state
from cdc_plugin.checkpoints.safe_pickle.names import InertRecord
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SPEC = {"family": "resnet", "block": "basic", "depths": [1, 1, 1, 1], "widths": [4, 6, 8, 10]}


def features(network, images=IMAGES):
    with torch.no_grad():
        return network.eval()(images)


def checkpoint(path, normalize=None, **parts):
    """A Lightning checkpoint with lightly-train's record; parts by prefix."""
    state = {f"{prefix}.{key}": value for prefix, part in parts.items() for key, value in part.state_dict().items()}
    record = {"version": "0.18.0", "date": "2026-01-01", "models": {}, "normalize_args": normalize or {}}
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.0", "state_dict": state, "lightly_train": record}, path)
    return path


def wrapped(network, inner):
    return nn.ModuleDict({"wrapped_model": nn.ModuleDict({inner: network})})


def test_teacher_is_taken_and_the_student_on_request(tmp_path):
    student, teacher = build(SPEC)[0], build(SPEC)[0]
    path = checkpoint(
        tmp_path / "last.ckpt",
        {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
        teacher_embedding_model=wrapped(teacher, "_features"),
        student_embedding_model=wrapped(student, "_features"),
        teacher_projection_head=nn.Linear(10, 4),
    )
    found = load_checkpoint(path)
    assert torch.equal(features(found.backbone), features(teacher))
    assert (found.format, found.origin.writer, found.origin.epoch) == ("lightly-train", "lightly-train 0.18.0", 2)
    assert found.backbone.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert found.backbone.std.tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert found.backbone.inferred == ("input_size",)
    asked = load_checkpoint(path, wanted=Wanted(branch="online"))
    assert torch.equal(features(asked.backbone), features(student))


def test_embedding_of_simclr_is_the_only_branch(tmp_path):
    network = build(SPEC)[0]
    path = checkpoint(
        tmp_path / "last.ckpt", embedding_model=wrapped(network, "_model"), projection_head=nn.Linear(4, 4)
    )
    assert torch.equal(features(load_checkpoint(path).backbone), features(network))
    with pytest.raises(UserError, match="no momentum branch"):
        load_checkpoint(path, wanted=Wanted(branch="momentum"))


def test_transformer_gives_the_mean_of_its_patches_as_lightly_train_embeds(tmp_path):
    network = timm.create_model("test_vit", num_classes=3)
    path = checkpoint(tmp_path / "last.ckpt", embedding_model=wrapped(network, "_model"))
    images = torch.rand(2, 3, 160, 160)
    with torch.no_grad():
        tokens = network.eval().forward_features(images)[:, network.num_prefix_tokens :]
    found = load_checkpoint(path)
    torch.testing.assert_close(features(found.backbone, images), tokens.mean(dim=1))
    assert "patch tokens" in found.origin.why["features"]
    assert build(found.backbone.spec)[0].state_dict().keys() == found.backbone.module.state_dict().keys()


def test_export_is_told_by_its_folder_and_normalised_as_lightly_train_does(tmp_path):
    network = timm.create_model("test_resnet", num_classes=3)
    (tmp_path / "exported_models").mkdir()
    path = tmp_path / "exported_models" / "exported_last.pt"
    torch.save(network.state_dict(), path)
    found = load_checkpoint(path)
    network.reset_classifier(0)
    assert torch.equal(features(found.backbone), features(network))
    assert found.format == "lightly-train"
    assert found.backbone.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])  # timm's own are 0.5
    assert {"mean", "std"} <= set(found.backbone.inferred)


def test_whole_model_in_the_record_stands_in_where_the_weights_have_strange_names(tmp_path):
    inner = InertRecord("torch.nn.modules.linear.Linear")
    inner.fields = {"_parameters": {"weight": torch.ones(2), "bias": None}, "_buffers": {}, "_modules": {}}
    outer = InertRecord("x.Net")
    outer.fields = {"_parameters": {}, "_buffers": {"mean": torch.zeros(1)}, "_modules": {"fc": inner, "loop": None}}
    assert list(read_module_state(outer)) == ["mean", "fc.weight"]
    outer.fields["_modules"]["loop"] = outer  # a damaged file may do so
    assert len(read_module_state(outer)) < 100


def test_unknown_network_of_lightly_train_is_refused_by_name(tmp_path):
    path = checkpoint(tmp_path / "last.ckpt", embedding_model=wrapped(nn.Conv2d(3, 4, 3), "_model"))
    with pytest.raises(UserError, match=r"of lightly-train, but holds no network.*arch="):
        load_checkpoint(path)

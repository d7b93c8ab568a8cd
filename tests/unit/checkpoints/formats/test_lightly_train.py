"""Choices and refusals for lightly-train's files; features and input are in tests/interop/test_layouts."""

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.formats.lightly_train import read_module_state
from cdc_plugin.checkpoints.safe_pickle.names import InertRecord
from cdc_plugin.errors import UserError
from tests.helpers.checkpoint_builders.networks import LARGE_STEM, resnet
from tests.helpers.checkpoint_builders.self_supervised import (
    lightly_train_payload,
    lightly_train_teacher,
    lightly_train_transformer,
    wrapped,
)


def test_student_is_taken_on_request(tmp_path):
    path = lightly_train_teacher(tmp_path).path
    found = load_checkpoint(path, wanted=Wanted(branch="online"))
    assert torch.equal(found.backbone.module.conv1.weight, resnet(LARGE_STEM, 64).conv1.weight)
    assert (found.format, found.origin.writer, found.origin.epoch) == ("lightly-train", "lightly-train 0.18.0", 2)


def test_embedding_of_simclr_is_the_only_branch(tmp_path):
    payload = lightly_train_payload(embedding_model=wrapped(resnet(LARGE_STEM, 64), "_model"))
    torch.save(payload, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="no momentum branch"):
        load_checkpoint(tmp_path, wanted=Wanted(branch="momentum"))


def test_whole_model_in_the_record_stands_in_where_the_weights_have_strange_names(tmp_path):
    inner = InertRecord("torch.nn.modules.linear.Linear")
    inner.fields = {"_parameters": {"weight": torch.ones(2), "bias": None}, "_buffers": {}, "_modules": {}}
    outer = InertRecord("x.Net")
    outer.fields = {"_parameters": {}, "_buffers": {"mean": torch.zeros(1)}, "_modules": {"fc": inner, "loop": None}}
    assert list(read_module_state(outer)) == ["mean", "fc.weight"]
    outer.fields["_modules"]["loop"] = outer  # a damaged file may do so
    assert len(read_module_state(outer)) < 100


def test_unknown_network_of_lightly_train_is_refused_by_name(tmp_path):
    torch.save(lightly_train_payload(embedding_model=wrapped(nn.Conv2d(3, 4, 3), "_model")), tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"of lightly-train, but holds no network.*arch="):
        load_checkpoint(tmp_path)


def test_transformer_whose_patch_tokens_are_averaged_is_resized(tmp_path):
    path = lightly_train_transformer(tmp_path).path
    backbone = load_checkpoint(path, wanted=Wanted(input_size=96)).backbone
    assert backbone.spec["family"] == "timm_map"
    assert backbone.eval()(torch.zeros(1, 3, 96, 96)).shape == (1, 64)

"""timm models: told by names and shapes, by what a run states, by older names; published ones."""

import argparse
import json
import socket

import pytest
import timm
import torch
from safetensors.torch import save_file
from torchvision import models

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.formats.timm.fit import find_distinct
from cdc_plugin.checkpoints.formats.timm.index import TABLE, fingerprint, make_table, names_like
from cdc_plugin.checkpoints.formats.torchvision import RESNETS, TWINS
from cdc_plugin.errors import UserError
from tests.helpers.checkpoint_builders.libraries import created, timm_training


def assert_same_features(path, network, size, **wanted):
    found = load_checkpoint(path, wanted=Wanted(**wanted))
    network.reset_classifier(0)
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(images), network(images), rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize(
    "name",
    ["test_resnet", "test_convnext", "test_efficientnet", "test_vit", "test_vit3", "test_byobnet", "test_mambaout"],
)
def test_model_is_told_by_its_names_and_shapes_alone(tmp_path, name):
    network = created(name, num_classes=7)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    found = assert_same_features(tmp_path / "a.pth", network, 160)
    assert (found.format, found.backbone.spec["name"]) == ("timm", name)
    assert {"mean", "std"} <= set(found.backbone.inferred)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"img_size": 32, "patch_size": 4}, 32),
        ({"img_size": 64, "reg_tokens": 4}, 64),
        ({"img_size": 64, "global_pool": "avg"}, 64),
    ],
)
def test_settings_of_a_transformer_are_read_from_its_weights(tmp_path, settings, size):
    network = created("test_vit", **settings)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    found = assert_same_features(tmp_path / "a.pth", network, size)
    assert found.backbone.input_size == size
    assert found.backbone.spec["kwargs"] == settings


def test_settings_of_a_run_are_taken_but_no_path_of_weights(tmp_path):
    found = load_checkpoint(timm_training(tmp_path).path)
    assert found.backbone.spec["kwargs"] == {"num_heads": 4, "img_size": 32, "patch_size": 4}


def test_image_size_that_a_run_states_is_taken(tmp_path):
    arguments = argparse.Namespace(model="test_resnet", img_size=40, mean=None, std=None, input_size=None)
    payload = {"arch": "test_resnet", "state_dict": created("test_resnet").state_dict(), "version": 2}
    torch.save(payload | {"args": arguments}, tmp_path / "last.pth.tar")
    assert load_checkpoint(tmp_path).backbone.input_size == 40
    with pytest.raises(UserError, match="no moving average"):
        load_checkpoint(tmp_path, wanted=Wanted(branch="momentum"))


@pytest.mark.parametrize("nested", [True, False])
def test_config_of_the_hub_states_model_and_input(tmp_path, nested):
    network = created("test_vit", num_heads=4)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    facts = {"input_size": [3, 160, 160], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    config = {"architecture": "test_vit", "model_args": {"num_heads": 4}, "num_features": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | ({"pretrained_cfg": facts} if nested else facts)))
    found = assert_same_features(tmp_path, network, 160)
    assert found.backbone.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert found.backbone.std.tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert found.backbone.inferred == ()


def test_older_names_are_renamed_by_timm_itself(tmp_path):
    network = created("test_convnext")
    renamed = {"head.norm.": "norm.", "head.fc.": "head.", "stem.": "downsample_layers.0.", ".blocks.": "."}
    renamed |= {".conv_dw.": ".dwconv.", ".mlp.fc1.": ".pwconv1.", ".mlp.fc2.": ".pwconv2."}
    renamed |= {f"stages.{stage}.downsample.": f"downsample_layers.{stage}." for stage in range(4)}
    old = {}
    for key, value in network.state_dict().items():
        for new_name, old_name in renamed.items():
            key = key.replace(new_name, old_name)
        old[key] = value
    torch.save(old, tmp_path / "a.pth")
    assert_same_features(tmp_path / "a.pth", network, 160, arch="test_convnext")


def test_weights_that_would_have_to_be_resized_are_refused(tmp_path):
    state = created("test_vit").state_dict()
    state["pos_embed"] = state["pos_embed"][:, :60]
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(UserError):
        load_checkpoint(tmp_path / "a.pth", wanted=Wanted(arch="test_vit"))


def test_file_name_of_a_timm_model_does_not_hide_a_torchvision_one(tmp_path):
    with torch.device("meta"):
        network = models.convnext_tiny()
    torch.save({k: torch.zeros(v.shape) for k, v in network.state_dict().items()}, tmp_path / "convnext_tiny.pth")
    found = load_checkpoint(tmp_path / "convnext_tiny.pth")
    assert found.backbone.spec == {"family": "torchvision", "name": "convnext_tiny"}


def test_plain_resnet_is_assumed_only_where_nothing_tells_it_from_networks_with_the_same_weights(tmp_path):
    network = created("resnetblur18", num_classes=7)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    found = load_checkpoint(tmp_path / "a.pth")
    assert "network" in found.backbone.inferred
    assert "resnetblur18" in found.origin.why["network"]
    torch.save({"arch": "resnet18", "state_dict": network.state_dict()}, tmp_path / "b.pth")
    assert "network" not in load_checkpoint(tmp_path / "b.pth").backbone.inferred
    torch.save({"arch": "resnetblur18", "state_dict": network.state_dict()}, tmp_path / "c.pth")
    torch.save(network.state_dict(), tmp_path / "resnetblur18_rsb-ab12.pth")
    for path, wanted in (("c.pth", {}), ("resnetblur18_rsb-ab12.pth", {}), ("a.pth", {"arch": "resnetblur18"})):
        found = assert_same_features(tmp_path / path, network, 64, **wanted)
        assert "network" not in found.backbone.inferred


def test_networks_with_the_weights_of_a_plain_resnet_are_all_known():
    table = [names for names in json.loads(TABLE.read_text()).values() if set(names) & set(RESNETS)]
    for names in table:
        plain = next(name for name in RESNETS if name in names)
        kinds = find_distinct([plain, *names], created(plain).state_dict())
        assert set(kinds) == {plain, *TWINS.get(plain, ())}


def test_table_knows_the_models_of_this_timm():
    names = ["test_resnet", "test_vit", "vit_tiny_patch16_224", "mobilenetv3_small_050", "resnet18d"]
    with torch.device("meta"):
        states = {name: timm.create_model(name, num_classes=0).state_dict() for name in names}
    for key, listed in make_table(states).items():
        assert set(listed) <= set(json.loads(TABLE.read_text())[key])


def test_fingerprint_ignores_classifier_and_image_size_but_not_widths():
    state = {"patch_embed.proj.weight": torch.ones(8, 3, 4, 4), "pos_embed": torch.ones(1, 17, 8), "a": torch.ones(8)}
    same = state | {"pos_embed": torch.ones(1, 5, 8), "head.weight": torch.ones(2, 8)}
    assert fingerprint(state) == fingerprint(same)
    assert fingerprint(state) != fingerprint(state | {"a": torch.ones(9)})
    assert names_like(state) == ()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    def nowhere(*_arguments):
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_published_weights_are_refused_at_once_without_a_network(offline):
    with pytest.raises(UserError, match=r"could not fetch.*arch='convnext_zepto_rms'"):
        load_checkpoint("timm:convnext_zepto_rms")
    with pytest.raises(UserError, match="timm has no model 'resnet1'"):
        load_checkpoint("timm:resnet1")
    with pytest.raises(UserError, match=r"could not fetch 'nobody/nothing-of-it'"):
        load_checkpoint("hf-hub:nobody/nothing-of-it")
    with pytest.raises(UserError, match="OWNER/NAME"):
        load_checkpoint("hf-hub:nothing")


def test_cached_repository_of_the_hub_needs_no_network(offline, tmp_path, monkeypatch):
    network = created("test_resnet")
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_resnet"}))
    found_in_cache = lambda _name, file, **_more: str(tmp_path / file)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", found_in_cache)
    assert assert_same_features("hf-hub:somebody/something", network, 64).format == "timm"
    assert load_checkpoint("hf-hub:somebody/something", wanted=Wanted(arch="test_resnet")).format == "timm"


@pytest.mark.parametrize(("index", "whole"), [("given", True), ("half", False), ("{}", False), ("[", False)])
def test_cached_repository_may_keep_its_weights_in_parts(offline, tmp_path, monkeypatch, index, whole):
    network = created("test_resnet")
    state = list(network.state_dict().items())
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for place, name in enumerate(names[: 1 if index == "half" else 2]):
        save_file(dict(state[place::2]), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_resnet"}))
    named = {"weight_map": dict(zip([key for key, _ in state], names, strict=False))}
    text = json.dumps(named) if index in ("given", "half") else index
    (tmp_path / "model.safetensors.index.json").write_text(text)
    found = lambda _name, file, **_more: str(tmp_path / file) if (tmp_path / file).is_file() else None  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", found)
    if whole:
        assert assert_same_features("hf-hub:somebody/something", network, 64).format == "timm"
    else:
        with pytest.raises(UserError, match="could not fetch"):
            load_checkpoint("hf-hub:somebody/something")

"""CLIP of open_clip and OpenAI: the tower in plain torch, and what tells which GELU it was trained with."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import Mlp
from torch import nn

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.checkpoints.pool import find_pools
from cdc_plugin.errors import UserError
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from tests.helpers.checkpoint_builders.networks import with_noise
from tests.helpers.checkpoint_builders.vits import LAYERS, OPEN_CLIP, PATCH, SIDE, WIDTH, encode, images_of, make_vit

TOWER = make_vit(OPEN_CLIP)
PROJECTION = torch.randn(WIDTH, 7, generator=torch.Generator().manual_seed(1))
MODEL = {**{f"visual.{key}": value for key, value in TOWER.items()}, "visual.proj": PROJECTION}
MODEL |= {"token_embedding.weight": torch.ones(9, 4), "logit_scale": torch.ones(())}
RELEASED = {name: torch.tensor(7) for name in ("input_resolution", "context_length", "vocab_size")}
VISION = {"image_size": SIDE, "layers": LAYERS, "width": WIDTH, "patch_size": PATCH, "head_width": 8}


class Part(nn.Module):
    """A module with the parameters, and inner modules, that dotted names ask for."""

    def __init__(self, state):
        super().__init__()
        for key, value in state.items():
            if "." not in key:
                self.register_buffer(key, value)
        for name in dict.fromkeys(key.partition(".")[0] for key in state if "." in key):
            inner = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{name}.")}
            self.add_module(name, Part(inner))

    def forward(self, x):
        return x


def expected(act):
    return encode(TOWER, OPEN_CLIP, images_of(), 1e-5, act)[:, 0] @ PROJECTION


def hub_folder(folder, preprocess=None, **config):
    folder.mkdir(exist_ok=True)
    save_file(MODEL, folder / "open_clip_model.safetensors")
    settings = {"model_cfg": {"vision_cfg": VISION, **config}, "preprocess_cfg": preprocess or {}}
    (folder / "open_clip_config.json").write_text(json.dumps(settings))
    return folder


def assert_features(path, act, **wanted):
    found = load_checkpoint(path, wanted=Wanted(**wanted))
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(images_of()), expected(act), rtol=1e-4, atol=1e-5)
    assert found.format == "clip"
    return found


@pytest.mark.parametrize(("config", "act"), [({"quick_gelu": True}, "quick_gelu"), ({}, "gelu")])
def test_folder_of_the_hub_states_its_gelu(tmp_path, config, act):
    assert_features(hub_folder(tmp_path, **config), act)


# The shapes of a tower leave its heads open: those of this small one are usual for no width.
@pytest.fixture
def usual_heads(monkeypatch):
    monkeypatch.setattr("cdc_plugin.checkpoints.formats.clip.find_heads", lambda *_: 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_files_of_openai_are_quick_and_others_are_asked_for(tmp_path, usual_heads):
    torch.save({**MODEL, **RELEASED}, tmp_path / "a.pt")
    assert_features(tmp_path / "a.pt", "quick_gelu")
    torch.jit.save(torch.jit.script(Part({**MODEL, **RELEASED})), tmp_path / "b.pt")
    assert_features(tmp_path / "b.pt", "quick_gelu")
    training = {"epoch": 4, "state_dict": {f"module.{key}": value for key, value in MODEL.items()}, "name": "run"}
    torch.save(training, tmp_path / "epoch_4.pt")
    with pytest.raises(UserError, match="which GELU"):
        load_checkpoint(tmp_path / "epoch_4.pt")
    assert assert_features(tmp_path / "epoch_4.pt", "gelu", arch="ViT-B-32").origin.epoch == 4
    assert_features(tmp_path / "epoch_4.pt", "quick_gelu", arch="ViT-B-32-quickgelu")


@pytest.mark.parametrize(
    ("preprocess", "config", "message"),
    [
        ({}, {"vision_cfg": {**VISION, "pool_type": "max"}}, "in a way that is not read"),
        ({}, {"vision_cfg": {**VISION, "scale_heads": True}}, "scale_heads"),
        ({}, {"vision_cfg": {**VISION, "act_kwargs": {"approximate": "other"}}}, "act_kwargs"),
        ({}, {"vision_cfg": {**VISION, "norm_kwargs": {"eps": "1"}}}, "'eps' lies between"),
        ({}, {"vision_cfg": {**VISION, "attentional_pool": True}}, "attentional_pool"),
        ({}, {"vision_cfg": {**VISION, "head_width": -1}}, "head_width lies between"),
        ({}, {"vision_cfg": {**VISION, "layers": 12}}, "2 of 12 layers"),
        ({"resize_mode": "longest"}, {}, "photos are resized"),
        ({"interpolation": ["bicubic"]}, {}, "photos are resized"),
        ({"size": 64}, {}, "size is 32"),
        ({"mean": [float("nan")] * 3, "std": [1.0] * 3}, {}, "take 3 numbers"),
    ],
)
def test_hostile_or_foreign_settings_are_refused_in_one_line(tmp_path, preprocess, config, message):
    with pytest.raises(UserError, match=message) as refusal:
        load_checkpoint(hub_folder(tmp_path, preprocess, **config))
    assert "\n" not in str(refusal.value)


def test_tower_may_pool_its_patches_and_lack_the_first_norm(tmp_path):
    state = {key: value for key, value in TOWER.items() if not key.startswith("ln_pre.")}
    neutral = {"ln_post.weight": torch.ones(WIDTH), "ln_post.bias": torch.zeros(WIDTH)}
    weights = {f"visual.{key}": value for key, value in (state | neutral).items()}
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    pooled = {**VISION, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}
    settings = {"model_cfg": {"vision_cfg": pooled}, "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(settings))
    network = load_checkpoint(tmp_path).backbone.eval()
    with torch.no_grad():
        features = network(images_of())
        tokens = network.module.forward_features(images_of())
    torch.testing.assert_close(features, nn.functional.layer_norm(tokens[:, 1:].mean(dim=1), (WIDTH,)))
    assert isinstance(network.module.norm_pre, nn.Identity)


def write_trunk(folder, name, head, own=0, **vision):
    """Write a tower of timm as open_clip does, and return the trunk."""
    trunk = with_noise(timm.create_model(name, num_classes=own), seed=2).eval()
    state = {f"visual.trunk.{key}": value for key, value in trunk.state_dict().items()}
    state |= {f"visual.head.{key}": value for key, value in head.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    config = {"vision_cfg": {"timm_model_name": name, "image_size": 64, **vision}, "embed_dim": 5}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    return trunk


@pytest.mark.parametrize("kind", ["none", "linear", "mlp", "own"])
@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_tower_of_timm_is_read_with_its_projection(tmp_path, name, kind):
    width = timm.create_model(name, num_classes=0).num_features
    head = nn.Sequential()
    if kind == "linear":
        head.proj = nn.Linear(width, 5, bias=False)
    elif kind == "mlp":
        head.mlp = Mlp(width, 10, 5)
    trunk = write_trunk(tmp_path, name, head, 5 if kind == "own" else 0)
    images = torch.randn(2, 3, *timm.get_pretrained_cfg(name).input_size[1:])
    found = load_checkpoint(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(images), head(trunk(images)))
        if kind in ("linear", "mlp"):
            plain = find_pools(found.backbone)[1][-1]
            before = load_checkpoint(tmp_path, wanted=Wanted(pool=plain)).backbone.eval()(images)
            assert before.shape == (2, width)
    heads = [ClusterHead(found.backbone.feature_dim, 4, 3) for _ in range(2)]
    (tmp_path / "out").mkdir()
    Clusterer(found.backbone, *heads).save(tmp_path / "out", {})
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "out").backbone.eval()(images), head(trunk(images)))


def test_tower_of_timm_with_an_attention_pool_of_its_own_is_refused(tmp_path):
    head = nn.Sequential()
    head.pool = nn.Linear(3, 3)
    write_trunk(tmp_path, "test_convnext", head, timm_pool="rot_attn")
    with pytest.raises(UserError, match="pools by 'rot_attn'"):
        load_checkpoint(tmp_path)

"""Folders of transformers: the networks in plain torch, photos prepared as the folder says, hostile settings."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision import models
from torchvision.transforms.v2 import functional

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.data.images import open_images
from cdc_plugin.data.stream import read_images
from cdc_plugin.data.views import plain_view, storage_size, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from tests.helpers.checkpoint_builders import IMAGENET
from tests.helpers.checkpoint_builders.networks import with_noise
from tests.helpers.checkpoint_builders.vits import (
    CLIP,
    DINOV2,
    HEADS,
    LAYERS,
    PATCH,
    SIDE,
    VIT,
    WIDTH,
    encode,
    images_of,
    make_vit,
)

SIZES = {
    **{"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"intermediate_size": 2 * WIDTH, "mlp_ratio": 2, "image_size": SIDE, "patch_size": PATCH},
}
SQUEEZED = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}, "resample": 2}
CROPPED = {
    **{"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 40}, "resample": 3},
    **{"do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}},
}
STATISTICS = {"image_mean": IMAGENET[0], "image_std": IMAGENET[1]}


def write(folder, kind, state, preprocessor=SQUEEZED, **config):
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["A"], **SIZES, **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**STATISTICS, **preprocessor}))
    return folder


def features(folder, **wanted):
    found = load_checkpoint(folder, wanted=Wanted(**wanted))
    with torch.no_grad():
        return found, found.backbone.eval()(images_of())


@pytest.mark.parametrize(
    ("kind", "names", "eps", "more"),
    [("vit", VIT, 1e-12, {}), ("vit_mae", VIT, 1e-3, {"layer_norm_eps": 1e-3}), ("dinov2", DINOV2, 1e-6, {})],
)
@pytest.mark.parametrize("prefix", ["", "inside."])
def test_tokens_are_those_of_the_network_in_plain_torch(tmp_path, kind, names, eps, more, prefix):
    state = make_vit(names)
    extra = {"pooler.dense.weight": torch.ones(3, 3)} if not prefix else {"classifier.weight": torch.ones(2, WIDTH)}
    write(tmp_path, kind, {**{prefix + key: value for key, value in state.items()}, **extra}, **more)
    tokens = encode(state, names, images_of(), eps)
    found, by_default = features(tmp_path)
    torch.testing.assert_close(by_default, tokens[:, 0], rtol=1e-4, atol=1e-5)
    assert found.format == "transformers"
    torch.testing.assert_close(features(tmp_path, pool="mean")[1], tokens[:, 1:].mean(dim=1), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"pool is one of class, mean .*'attention'"):
        features(tmp_path, pool="attention")


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_clip_gives_its_projection_and_without_one_its_class_token(tmp_path, act):
    state = make_vit(CLIP)
    token = encode(state, CLIP, images_of(), 1e-5, act)[:, 0]
    write(tmp_path, "clip_vision_model", state, hidden_act=act)
    torch.testing.assert_close(features(tmp_path)[1], token, rtol=1e-4, atol=1e-5)
    whole = {**{f"vision_model.{key}": value for key, value in state.items()}, "text_model.a": torch.ones(2)}
    whole["visual_projection.weight"] = torch.randn(7, WIDTH)
    write(tmp_path, "clip", whole, projection_dim=7, vision_config={**SIZES, "hidden_act": act})
    expected = token @ whole["visual_projection.weight"].T
    torch.testing.assert_close(features(tmp_path)[1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features(tmp_path, pool="class")[1], token, rtol=1e-4, atol=1e-5)


def test_residual_network_is_torchvisions_under_other_names(tmp_path):
    network = with_noise(models.resnet18(), seed=3)
    renamed = {}
    for key, value in network.state_dict().items():
        parts = key.split(".")
        if parts[0] in ("conv1", "bn1"):
            name = f"embedder.embedder.{'convolution' if parts[0] == 'conv1' else 'normalization'}"
        elif parts[0] == "fc":
            continue
        else:
            inner = f"layer.{int(parts[2][-1]) - 1}" if parts[2] != "downsample" else "shortcut"
            last = "convolution" if parts[2][:4] == "conv" or parts[2:4] == ["downsample", "0"] else "normalization"
            name = f"encoder.stages.{int(parts[0][-1]) - 1}.layers.{parts[1]}.{inner}.{last}"
        renamed[f"{name}.{parts[-1]}"] = value
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic", "hidden_act": "relu"}
    write(tmp_path, "resnet", renamed, **sizes)
    network.fc = torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(features(tmp_path)[1], network.eval()(images_of()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(90, 61), (45, 120), (64, 64)])
@pytest.mark.parametrize(
    ("preprocessor", "stored", "mode"),
    [(SQUEEZED, (32, 32), "bilinear"), (CROPPED, None, "bicubic"), ({**CROPPED, "crop_size": 40}, None, "bicubic")],
)
def test_photos_are_prepared_as_the_folder_says(tmp_path, shape, preprocessor, stored, mode):
    pixels = np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    backbone = load_checkpoint(write(tmp_path / "net", "dinov2", make_vit(DINOV2), preprocessor)).backbone
    size = stored or [int(40 * edge / min(shape)) for edge in shape]
    resized = functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), size, mode, antialias=True)
    side = int(backbone.input_size)
    top, left = ((edge - side) // 2 for edge in resized.shape[1:])  # transformers rounds down, torchvision to even
    expected = resized[:, top : top + side, left : left + side].float() / 255
    expected = (expected - torch.tensor(IMAGENET[0])[:, None, None]) / torch.tensor(IMAGENET[1])[:, None, None]
    squares = [open_images(source, backbone.input_size).images for source in (tmp_path / "a.png", pixels[None])]
    squares.append(read_images(tmp_path / "a.png", storage_size(backbone.input_size), [0]))
    for images in squares:
        view = plain_view(torch.from_numpy(images).permute(0, 3, 1, 2), view_settings(backbone))[0]
        torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5)


def test_result_keeps_how_photos_are_prepared_and_which_vector_is_taken(tmp_path):
    state = make_vit(DINOV2)
    folder = write(tmp_path / "net", "dinov2", state, CROPPED)
    backbone = load_checkpoint(folder, wanted=Wanted(pool="mean")).backbone
    heads = [ClusterHead(WIDTH, 8, 3) for _ in range(2)]
    (tmp_path / "out").mkdir()
    Clusterer(backbone, *heads).save(tmp_path / "out", {})
    again = load_model(tmp_path / "out").backbone
    assert vars(again.input_size) == vars(backbone.input_size)
    with torch.no_grad():
        torch.testing.assert_close(again(images_of()), encode(state, DINOV2, images_of(), 1e-6)[:, 1:].mean(dim=1))
    other = load_checkpoint(folder, wanted=Wanted(input_size=64)).backbone.input_size
    assert (other, other.stored, other.resample) == (64, 80, "bicubic")


@pytest.mark.parametrize(
    ("config", "preprocessor", "message"),
    [
        ({"hidden_size": "24"}, {}, "hidden_size lies between"),
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers lies between"),
        ({"num_attention_heads": [3]}, {}, "num_attention_heads lies between"),
        ({"hidden_act": "__import__('os')"}, {}, "hidden_act is one of"),
        ({"layer_norm_eps": True}, {}, "layer_norm_eps lies between"),
        ({"num_channels": 4}, {}, "num_channels lies between"),
        ({"num_hidden_layers": 3}, {}, "9 missing|missing"),
        ({"model_type": "vilt"}, {}, "'vilt' is not read, only vit, "),
        ({"model_type": ["vit"]}, {}, "is not read"),
        ({}, {"size": {"height": 32, "width": 64}}, "size is that of a square"),
        ({}, {"size": 10**9}, "size is that of a square"),
        ({}, {"resample": 6}, "resample 0 to 5"),
        ({}, {"do_pad": True}, "not padded"),
        ({"auto_map": {"AutoModel": "evil.Net"}}, {}, "code of its own"),
        ({}, {"rescale_factor": 2.0}, "rescale_factor lies"),
        ({}, {"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({}, {"rescale_offset": True}, "rescale_offset"),
        ({}, {"image_processor_type": "Siglip2ImageProcessor"}, "Siglip2ImageProcessor"),
        ({}, {"image_processor_type": 7}, "is not read"),
        ({}, {"size": {"shortest_edge": 32, "longest_edge": 64}}, "size is that of a square"),
        ({}, {"image_std": [0.0, 1.0, 1.0]}, "take 3 numbers"),
        ({}, {"image_mean": [float("nan")] * 3}, "take 3 numbers"),
        ({}, {"image_mean": [0.5] * 4}, "take 3 numbers"),
        ({"model_type": "convnext", "depths": [1, 1], "patch_size": 4}, {}, "cannot build|could not build"),
        ({}, {"do_center_crop": True, "crop_size": 64}, "at most size"),
        ({}, {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0}, "crop_pct lies"),
    ],
)
def test_hostile_or_foreign_settings_are_refused_in_one_line(tmp_path, config, preprocessor, message):
    write(tmp_path, "vit", make_vit(VIT), {**SQUEEZED, **preprocessor}, **config)
    with pytest.raises(UserError, match=message) as refusal:
        load_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


def test_pixels_of_another_scale_are_normalised_as_stated(tmp_path):
    def statistics(name, **preprocessor):
        backbone = load_checkpoint(write(tmp_path / name, "vit", make_vit(VIT), {**SQUEEZED, **preprocessor})).backbone
        return torch.stack([backbone.mean, backbone.std])

    mean, std = torch.tensor(IMAGENET[0]), torch.tensor(IMAGENET[1])
    torch.testing.assert_close(statistics("twice", rescale_factor=2 / 255), torch.stack([mean, std]) / 2)
    half = torch.full((3,), 0.5)
    torch.testing.assert_close(statistics("same", image_mean=0.5, image_std=0.5), torch.stack([half, half]))
    torch.testing.assert_close(statistics("none", do_rescale=False), torch.stack([mean, std]) / 255)


def test_weights_in_parts_are_read_together(tmp_path):
    state = make_vit(VIT)
    whole = features(write(tmp_path, "vit", state))[1]
    (tmp_path / "model.safetensors").unlink()
    for number in range(3):
        part = {key: value.contiguous() for key, value in list(state.items())[number::3]}
        save_file(part, tmp_path / f"model-{number + 1:05}-of-00003.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    torch.testing.assert_close(features(tmp_path)[1], whole)
    torch.testing.assert_close(features(tmp_path / "model-00002-of-00003.safetensors")[1], whole)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"3 parts, and 1 .* as model-00002-of-00003"):
        features(tmp_path)


def write_swin(folder, image_size, **config):
    network = with_noise(timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **SWIN, img_size=56), seed=1)
    renamed = {}
    for key, value in network.state_dict().items():
        for old, new in SWIN_NAMES:
            key = re.sub(old, new, key)
        key = re.sub(r"layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", key)
        parts = value.chunk(3) if ".qkv." in key else (value,)
        names = [key.replace("qkv", name) for name in ("query", "key", "value")] if ".qkv." in key else [key]
        renamed |= dict(zip(names, parts, strict=True))
    settings = {**SWIN, "image_size": image_size, "layer_norm_eps": 1e-5, **config}
    size = {"height": image_size, "width": image_size}
    write(folder, "swin", renamed, {**SQUEEZED, "size": size}, **settings)
    return network


SWIN = {"embed_dim": 8, "mlp_ratio": 2.0, "depths": [1, 2], "num_heads": [1, 2], "window_size": 7, "patch_size": 4}
SWIN_NAMES = (
    *((r"^patch_embed\.proj", "embeddings.patch_embeddings.projection"), (r"^patch_embed\.norm", "embeddings.norm")),
    *((r"^layers", "encoder.layers"), (r"^norm", "layernorm"), (r"norm1", "layernorm_before")),
    *((r"norm2", "layernorm_after"), (r"mlp\.fc1", "intermediate.dense"), (r"mlp\.fc2", "output.dense")),
    *((r"attn\.proj", "attention.output.dense"), (r"attn", "attention.self")),
)


def test_windows_are_those_of_the_folder_or_it_is_refused(tmp_path):
    network = write_swin(tmp_path / "even", 56).eval()
    found = load_checkpoint(tmp_path / "even").backbone.eval()
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        torch.testing.assert_close(found(images), network(images))
    write_swin(tmp_path / "padded", 64)
    with pytest.raises(UserError, match="windows of 7 do not divide"):
        load_checkpoint(tmp_path / "padded")


def test_weights_without_their_config_ask_for_it(tmp_path):
    save_file(make_vit(VIT), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"config\.json beside it"):
        load_checkpoint(tmp_path)

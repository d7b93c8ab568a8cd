"""Folders that transformers writes and models of open_clip, against what these libraries compute, if installed."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.data.images import open_images
from cdc_plugin.data.views import plain_view, view_settings
from tests.helpers.checkpoint_builders.networks import with_noise

VIT = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 16, "image_size": 64}
PLAIN = {**VIT, "intermediate_size": 192}
TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
STAGES = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 2, 1]}
SWIN = {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
WIDE = {"vision_config": PLAIN, "text_config": TEXT}
# Class of the network, settings, class and settings of the image processor.
CASES = {
    "vit": ("ViTModel", PLAIN, "ViT", {}),
    "vit larger": ("ViTForImageClassification", PLAIN, "ViT", {"size": {"height": 96, "width": 96}}),
    "mae": ("ViTMAEModel", {**PLAIN, "mask_ratio": 0.0}, "ViT", {}),
    "ijepa": ("IJepaModel", PLAIN, "ViT", {}),
    "dinov2": ("Dinov2Model", VIT, "Bit", {}),
    "dinov2 smaller": ("Dinov2Model", VIT, "Bit", {"crop_size": {"height": 48, "width": 48}}),
    "dinov2 gated": ("Dinov2Model", {**VIT, "use_swiglu_ffn": True}, "Bit", {}),
    "registers": ("Dinov2WithRegistersModel", VIT, "Bit", {"crop_size": {"height": 48, "width": 48}}),
    "dinov3": ("DINOv3ViTModel", {**PLAIN, "num_register_tokens": 4}, "DINOv3ViT", {}),
    "dinov3 gated": ("DINOv3ViTModel", {**PLAIN, "use_gated_mlp": True, "hidden_act": "silu"}, "DINOv3ViT", {}),
    "dinov3 convnext": ("DINOv3ConvNextModel", STAGES, "DINOv3ViT", {}),
    "clip tower": ("CLIPVisionModel", PLAIN, "CLIP", {}),
    "clip projection": ("CLIPVisionModelWithProjection", {**PLAIN, "projection_dim": 48}, "CLIP", {}),
    "clip": ("CLIPModel", {**WIDE, "projection_dim": 48}, "CLIP", {}),
    "siglip": ("SiglipModel", WIDE, "Siglip", {}),
    "siglip tower": ("SiglipVisionModel", PLAIN, "Siglip", {}),
    "resnet": ("ResNetModel", {**STAGES, "embedding_size": 16}, "ConvNext", {}),
    "resnet basic": ("ResNetForImageClassification", {**STAGES, "layer_type": "basic"}, "ConvNext", {}),
    "convnext": ("ConvNextModel", STAGES, "ConvNext", {}),
    "convnextv2": ("ConvNextV2Model", STAGES, "ConvNext", {"size": {"shortest_edge": 384}}),
    "swin": ("SwinModel", SWIN, "ViT", {"resample": 3}),
    "swinv2": ("Swinv2Model", SWIN, "ViT", {}),
}
SIZES = {
    **{"Bit": {"size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}},
    **{"CLIP": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}},
    "ConvNext": {"size": {"shortest_edge": 64}},
}


def compute(network, name, images):
    """Return the vector that the authors evaluate."""
    if name in ("clip", "siglip"):
        found = network.get_image_features(images)
        return getattr(found, "pooler_output", found)
    if name == "clip projection":
        return network(images).image_embeds
    if "For" in type(network).__name__:
        network = network.base_model
    resized = {"interpolate_pos_encoding": True} if name in ("vit", "vit larger", "mae", "ijepa") else {}
    outputs = network(images, **resized)
    if name == "ijepa":
        return outputs.last_hidden_state.mean(dim=1)
    tokens = name.startswith(("vit", "mae", "dinov2", "registers", "dinov3")) and name != "dinov3 convnext"
    return outputs.last_hidden_state[:, 0] if tokens else outputs.pooler_output.flatten(1)


@pytest.mark.parametrize("name", CASES)
def test_features_and_pixels_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    kind, settings, processor, changes = CASES[name]
    make = getattr(transformers, kind)
    torch.manual_seed(0)
    network = with_noise(make(make.config_class(**settings))).eval()
    sizes = {**SIZES.get(processor, {"size": {"height": 64, "width": 64}}), **changes}
    prepare = getattr(transformers, f"{processor}ImageProcessor")(**sizes)
    network.save_pretrained(tmp_path)
    prepare.save_pretrained(tmp_path)
    backbone = load_checkpoint(tmp_path).backbone.eval()
    photo = np.random.default_rng(0).integers(0, 255, (90, 131, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    theirs = prepare(Image.fromarray(photo), return_tensors="pt")["pixel_values"]
    images = open_images(tmp_path / "photo.png", backbone.input_size)
    ours = plain_view(images.batch([0]), view_settings(backbone))
    # DINOv3's resizes before it rounds, and we keep whole levels of brightness.
    level = 1 / 255 / float(backbone.std.min()) if processor == "DINOv3ViT" else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=level)
    with torch.no_grad():
        torch.testing.assert_close(backbone(theirs), compute(network, name, theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("vision", [{"head_width": 32}, {"ls_init_value": 0.1}, {"layers": [3, 4, 6, 3]}])
def test_features_are_those_of_open_clip(tmp_path, quick, vision):
    open_clip = pytest.importorskip("open_clip")
    sizes = {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16, **vision}
    text = {"context_length": 8, "vocab_size": 99, "width": 64, "heads": 2, "layers": 1}
    side = 64 if isinstance(sizes["layers"], int) else 224
    network = with_noise(open_clip.CLIP(48, {**sizes, "image_size": side}, text, quick_gelu=quick)).eval()
    save_file(dict(network.state_dict()), tmp_path / "open_clip_model.safetensors")
    config = {"vision_cfg": {**sizes, "image_size": side}, "quick_gelu": quick}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = network.encode_image(images)
        torch.testing.assert_close(load_checkpoint(tmp_path).backbone.eval()(images), expected, rtol=1e-4, atol=1e-4)

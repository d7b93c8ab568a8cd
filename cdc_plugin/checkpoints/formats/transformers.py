"""Folders that the library transformers writes, read into timm's and torchvision's networks: tables of names."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats._vit import resize_positions
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.timm import three_numbers
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD
from cdc_plugin.checkpoints.pool import WORDS
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import build_backbone, strip_prefix
from cdc_plugin.config.schema import INPUT_FACTS, LARGEST_SIDE
from cdc_plugin.data.side import Side
from cdc_plugin.errors import CheckpointError, option, shorten
from cdc_plugin.models.architectures import STEM, describe

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
# What a config may say, with the library's usual value; anything else in it is not looked at.
SIDES, COUNTS, WIDTHS = (1, LARGEST_SIDE), (1, 200), (1, 65_536)
ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"},
    **{"relu": "relu", "silu": "silu", "swish": "silu"},
}
FIELDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{"image_size": (224, SIDES), "patch_size": (16, (1, 64)), "num_channels": (3, (3, 3))},
    **{"hidden_size": (768, WIDTHS), "intermediate_size": (3072, WIDTHS), "projection_dim": (512, WIDTHS)},
    **{"num_hidden_layers": (12, COUNTS), "num_attention_heads": (12, COUNTS), "num_register_tokens": (4, (0, 64))},
    **{"hidden_act": ("gelu", tuple(ACTIVATIONS)), "layer_norm_eps": (1e-12, (0.0, 0.1))},
    **{"qkv_bias": (True, (False, True)), "use_swiglu_ffn": (False, (False, True))},
    **{"mlp_ratio": (4.0, (0.0, 64.0)), "use_gated_mlp": (False, (False, True)), "rope_theta": (100.0, (1.0, 1e6))},
    **{"embed_dim": (96, WIDTHS), "depths": ([3, 3, 9, 3], COUNTS), "num_heads": ([3, 6, 12, 24], COUNTS)},
    **{"window_size": (7, (1, 64)), "pretrained_window_sizes": ([0, 0, 0, 0], (0, 64))},
    **{"use_absolute_embeddings": (False, (False, True)), "hidden_sizes": ([96, 192, 384, 768], WIDTHS)},
    **{"embedding_size": (64, WIDTHS), "layer_type": ("bottleneck", ("basic", "bottleneck"))},
    **{"downsample_in_first_stage": (False, (False, False)), "downsample_in_bottleneck": (False, (False, False))},
    **{"key_bias": (False, (False, False)), **dict.fromkeys(("query_bias", "value_bias"), (True, (True, True)))},
    **dict.fromkeys(("mlp_bias", "proj_bias"), (True, (True, True))),
    "vision_use_head": (True, (False, True)),
}
# Where the vision network begins, whatever stands before it, and what is of no use to its features.
BEGINNING = re.compile(r"(.*?)(embeddings\.patch_embedding|embedder\.embedder\.conv|stages\.0\.downsample_layers)")
UNUSED = re.compile(
    r"(pooler\.dense|classifier|decoder|text_model|text_projection|logit_scale|logit_bias)\b"
    r"|.*(mask_token|position_ids|relative_position_index|relative_coords_table)$"
)
Names = tuple[tuple[str, str], ...]
TOKENS: Names = (
    (r"^embeddings\.patch_embeddings?(\.projection)?\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^embeddings\.(class_embedding|cls_token)$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^(encoder\.|model\.)?layers?\.", "blocks."),
    (r"\.attention\.attention\.(q|k|v)[a-z]+\.|\.(?:self_attn|attention)\.(q|k|v)_proj\.", r".attn.\1\2."),
    (r"\.(attention\.output\.dense|self_attn\.out_proj|attention\.o_proj)\.", ".attn.proj."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.(intermediate\.dense|mlp\.weights_in|mlp\.up_proj)\.", ".mlp.fc1."),
    (r"(?<=\d)\.(output\.dense|mlp\.weights_out|mlp\.down_proj)\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(layernorm|post_layernorm)\.", "norm."),
    (r"^visual_projection\.", "head."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.(attention|mlp)(?=\.)", r"attn_pool.\1"),
)
ROTARY: Names = ((r"\.ls(\d)\.gamma$", r".gamma_\1"),)
GATED: Names = ((r"\.mlp\.fc1\.", ".mlp.fc1_x."), (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."), *ROTARY)
WINDOWS: Names = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^embeddings\.position_embeddings$", "absolute_pos_embed"),
    (r"^encoder\.", ""),
    (r"\.attention\.self\.(q|k|v)[a-z]+\.(?=weight|bias)", r".attn.\1."),
    (r"\.attention\.self\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
    (r"\.attention\.self\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
)
CONVOLUTIONS: Names = (
    (r"^(embeddings\.patch_embeddings|stages\.0\.downsample_layers\.0)\.", "stem.0."),
    (r"^(embeddings\.layernorm|stages\.0\.downsample_layers\.1)\.", "stem.1."),
    (r"^(encoder\.|model\.)", ""),
    (r"^(layernorm|layer_norm)\.", "head.norm."),
    (r"\.(downsampling_layer|downsample_layers)\.", ".downsample."),
    (r"(?<=\d)\.layers\.", ".blocks."),
    (r"\.(dwconv|depthwise_conv)\.", ".conv_dw."),
    (r"\.(layernorm|layer_norm)\.", ".norm."),
    (r"\.(pwconv|pointwise_conv)(\d)\.", r".mlp.fc\2."),
    (r"\.grn\.", ".mlp.grn."),
    (r"\.layer_scale_parameter$", ".gamma"),
)
RESIDUAL: Names = (
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
)


class Config:
    """The values of a folder's config, each of the kind and in the range that ``FIELDS`` allows."""

    def __init__(self, fields: Mapping[str, Any], source: str, usual: Mapping[str, Any]) -> None:
        self.fields, self.source, self.usual = fields, source, usual

    def __getitem__(self, name: str) -> Any:
        default, allowed = FIELDS[name]
        value = self.fields.get(name)
        value = self.usual.get(name, default) if value is None else value
        if isinstance(default, int) and isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            value = value[0]  # height and width
        several = isinstance(default, list)
        items = value if several and isinstance(value, list | tuple) and 0 < len(value) <= 8 else [value]
        if several != isinstance(value, list | tuple) or not all(_is_allowed(item, allowed) for item in items):
            raise CheckpointError(f"{self.source}: {name} {_describe(default, allowed)}; found {shorten(value)}")
        return value


@dataclass(frozen=True)
class Family:
    """How the networks of one ``model_type`` are built, named and used."""

    build: Callable[[Config], dict[str, Any]]  # the spec of the same network in timm or torchvision
    names: Names
    pool: str  # the vector that its authors evaluate
    usual: Mapping[str, Any]  # settings where they differ from FIELDS
    normalised: tuple[tuple[float, ...], tuple[float, ...]] = (IMAGENET_MEAN, IMAGENET_STD)


def _transformer(name: str, **fixed: Any) -> Callable[[Config], dict[str, Any]]:
    """Return what builds the spec of a timm transformer; ``fixed`` are settings that no config changes."""

    def build(config: Config) -> dict[str, Any]:
        width = config["hidden_size"]
        kwargs = {
            **{"img_size": config["image_size"], "patch_size": config["patch_size"], "embed_dim": width},
            **{"depth": config["num_hidden_layers"], "num_heads": config["num_attention_heads"]},
            **{"mlp_ratio": _ratio(config["intermediate_size"], width), "qkv_bias": config["qkv_bias"]},
            "act_layer": ACTIVATIONS[config["hidden_act"]],
        }
        return {"family": "timm", "name": name, "kwargs": {**kwargs, **fixed}, "eps": config["layer_norm_eps"]}

    return build


def _dinov2(config: Config) -> dict[str, Any]:
    registers = config["num_register_tokens"] if "num_register_tokens" in config.usual else 0
    gated = config["use_swiglu_ffn"]
    name = f"vit_{'giant' if gated else 'base'}_patch14_{'reg4_' if registers else ''}dinov2"
    width = config["hidden_size"]
    inner = int(width * config["mlp_ratio"])
    ratio = _ratio(2 * ((2 * inner // 3 + 7) // 8 * 8) if gated else inner, width)
    spec = _transformer(name, init_values=1e-5, global_pool="token", mlp_ratio=ratio)(config)
    spec["kwargs"] |= {"reg_tokens": registers, "no_embed_class": True} if registers else {}
    if gated:
        del spec["kwargs"]["act_layer"]
    return spec


def _dinov3(config: Config) -> dict[str, Any]:
    gated = config["use_gated_mlp"]
    if config["hidden_act"] != ("silu" if gated else "gelu"):
        raise CheckpointError(f"{config.source}: hidden_act is gelu, or silu in a gated MLP, as its authors train it")
    for name in ("key_bias", "query_bias", "value_bias", "mlp_bias", "proj_bias"):
        config[name]  # refused unless it is as the authors have it
    fixed = {"num_reg_tokens": config["num_register_tokens"], "rope_temperature": config["rope_theta"]}
    name = f"vit_small_{'plus_' if gated else ''}patch16_dinov3_qkvb"
    spec = _transformer(name, global_pool="token", **fixed)(config)
    for argument in ("act_layer", "qkv_bias"):
        del spec["kwargs"][argument]
    return spec


def _clip(config: Config) -> dict[str, Any]:
    spec = _transformer("vit_base_patch16_clip_224", global_pool="token")(config)
    return spec | ({"projection": config["projection_dim"]} if config.fields.get("projected") is True else {})


def _siglip(config: Config) -> dict[str, Any]:
    pool = "map" if config["vision_use_head"] else "avg"
    spec = _transformer("vit_base_patch16_siglip_224", class_token=False, global_pool=pool)(config)
    spec["kwargs"] |= {"fc_norm": False} if pool == "avg" else {}
    return spec


def _swin(name: str) -> Callable[[Config], dict[str, Any]]:
    def build(config: Config) -> dict[str, Any]:
        names = ("patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias")
        kwargs = {"img_size": config["image_size"], **{name: config[name] for name in names}}
        if config["use_absolute_embeddings"] or config["hidden_act"] != "gelu":
            raise CheckpointError(f"{config.source}: expected gelu and no absolute embeddings, as its authors train it")
        if "v2" in name:
            windows = config["pretrained_window_sizes"]
            kwargs["pretrained_window_sizes"] = (list(windows) + [0] * 8)[: len(kwargs["depths"])]
        return {"family": "timm", "name": name, "kwargs": kwargs, "eps": config["layer_norm_eps"]}

    return build


def _convnext(name: str, eps: str = "final_eps") -> Callable[[Config], dict[str, Any]]:
    def build(config: Config) -> dict[str, Any]:
        kwargs = {"depths": config["depths"], "dims": config["hidden_sizes"]}
        if config["hidden_act"] != "gelu" or config["patch_size"] != 4:
            raise CheckpointError(f"{config.source}: expected gelu and patches of 4 px, as its authors train it")
        return {"family": "timm", "name": name, "kwargs": kwargs, eps: config["layer_norm_eps"]}

    return build


def _resnet(config: Config) -> dict[str, Any]:
    block, widths = config["layer_type"], config["hidden_sizes"]
    if config["hidden_act"] != "relu" or config["downsample_in_first_stage"] or config["downsample_in_bottleneck"]:
        raise CheckpointError(f"{config.source}: expected relu, and strides as torchvision's ResNets have them")
    inner = [width // 4 for width in widths] if block == "bottleneck" else list(widths)
    spec = {"family": "resnet", "block": block, "depths": list(config["depths"]), "widths": inner}
    return spec | {"stem": {**STEM, "width": config["embedding_size"]}}


VIT = Family(_transformer("vit_base_patch16_224", global_pool="token"), TOKENS, "class", {}, (HALF, HALF))
DINOV2 = Family(_dinov2, TOKENS, "class", {"patch_size": 14, "layer_norm_eps": 1e-6})
CLIP_USUAL = {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
CLIP = Family(_clip, TOKENS, "projection", CLIP_USUAL, (CLIP_MEAN, CLIP_STD))
SIGLIP_USUAL = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
SIGLIP = Family(_siglip, TOKENS, "attention", SIGLIP_USUAL, (HALF, HALF))
IJEPA = _transformer("vit_base_patch16_224", class_token=False, global_pool="avg", fc_norm=False)
DINOV3_USUAL = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "layer_norm_eps": 1e-5}
SWIN_USUAL = {"patch_size": 4, "depths": [2, 2, 6, 2], "layer_norm_eps": 1e-5}
STAGED_USUAL = {"patch_size": 4}
DINOV3_STAGED = {**STAGED_USUAL, "layer_norm_eps": 1e-6}
RESNET_USUAL = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "hidden_act": "relu"}
FAMILIES = {
    "vit": VIT,
    "vit_msn": replace(VIT, usual={"layer_norm_eps": 1e-6}, normalised=(IMAGENET_MEAN, IMAGENET_STD)),
    "vit_mae": replace(VIT, normalised=(IMAGENET_MEAN, IMAGENET_STD)),
    "ijepa": Family(IJEPA, TOKENS, "mean", {}),
    "dinov2": DINOV2,
    "dinov2_with_registers": replace(DINOV2, usual={**DINOV2.usual, "num_register_tokens": 4, "patch_size": 16}),
    "dinov3_vit": Family(_dinov3, TOKENS, "class", {**DINOV3_USUAL, "num_register_tokens": 0}),
    "dinov3_convnext": Family(_convnext("convnext_tiny", "eps"), CONVOLUTIONS, "mean", DINOV3_STAGED),
    **dict.fromkeys(("clip", "clip_vision_model"), CLIP),
    **dict.fromkeys(("siglip", "siglip_vision_model"), SIGLIP),
    "convnext": Family(_convnext("convnext_tiny"), CONVOLUTIONS, "mean", STAGED_USUAL),
    "convnextv2": Family(_convnext("convnextv2_tiny"), CONVOLUTIONS, "mean", STAGED_USUAL),
    "swin": Family(_swin("swin_tiny_patch4_window7_224"), WINDOWS, "mean", SWIN_USUAL),
    "swinv2": Family(_swin("swinv2_tiny_window8_256"), WINDOWS, "mean", SWIN_USUAL),
    "resnet": Family(_resnet, RESIDUAL, "mean", RESNET_USUAL),
}
# What a preprocessor may be and do, beyond its numbers.
PROCESSORS = re.compile("ViT|DeiT|Beit|CLIP|Bit|ConvNe|Siglip(?!2)|DINOv3ViT")
PILLOW = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))  # numbers of its filters
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb", "do_pad")
# Of others that are seen often: what to take instead.
ADVICE = {
    **dict.fromkeys(
        ("siglip2", "siglip2_vision_model"),
        "its images keep their shape; take the same weights for one size, as google/siglip2-base-patch16-224",
    ),
    **dict.fromkeys(("deit", "beit", "levit", "efficientnet", "regnet", "mobilenet_v2"), "timm has it: timm:NAME"),
    "timm_wrapper": "it is one of timm's: timm:NAME",
}


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a config of transformers lies beside the weights, or their names are those of its networks."""
    config = payload_fields(checkpoint.sidecar.get(CONFIG))
    stated = isinstance(config.get("model_type"), str) and "architecture" not in config
    if stated and (config["model_type"] in FAMILIES or "architectures" in config or "transformers_version" in config):
        return True
    return "architecture" not in config and any(BEGINNING.match(key) for key in checkpoint.state)


def load_transformers(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the vision network of a folder, fed as the folder's own settings for images say."""
    family, config, kind = _read_config(checkpoint)
    if wanted.arch is not None:
        raise CheckpointError(f"{config.source} states its own network; leave out {option('arch', wanted.arch)}")
    weights = _find_weights(checkpoint.state)
    projected = family is CLIP and "head.weight" in (state := rename(weights, family.names))
    config.fields = {**config.fields, "projected": projected}
    spec = family.build(config)
    if config.fields.get("use_gated_mlp") is True:
        names: Names = (*family.names, *GATED)
    else:
        names = (*family.names, *(ROTARY if kind == "dinov3_vit" else ()))
    state = arrange(rename(weights, names), spec)
    resize, mean, std, stated, why = _read_preprocessor(checkpoint, family)
    size = spec.get("kwargs", {}).get("img_size")
    side: int = resize or size or 224
    if kind in ("swin", "swinv2"):
        _check_windows(config, side, kind)
    if size is not None and "pos_embed" not in state:
        spec["kwargs"]["img_size"] = size = int(side)
    inferred = [name for name in INPUT_FACTS if name not in stated]
    facts = (mean, std, size or side, inferred)
    backbone, matched = build_backbone(spec, state, str(checkpoint.path), *facts, wanted.partial)
    if backbone.input_size != side:
        backbone = resize_positions(backbone, side, "" if "reg_token" in state else "transformers") or backbone
        why["input_size"] += f"; its position embeddings, for {size} px, are resized as transformers does"
    backbone.input_size = side
    pool = family.pool if projected or family is not CLIP else "class"
    pool = "mean" if family is SIGLIP and not config["vision_use_head"] else pool
    why["features"] = f"{WORDS[pool]}, as its authors evaluate it"
    version = payload_fields(checkpoint.sidecar.get(CONFIG)).get("transformers_version")
    writer = f"transformers {version[:20]}" if isinstance(version, str) else "transformers"
    network = f"{kind} of transformers, as {describe(backbone.spec)}"
    return Loaded(backbone, Origin(writer, why=why, network=network), matched=matched)


def _read_config(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    source = str(checkpoint.path.with_name(CONFIG))
    fields = payload_fields(checkpoint.sidecar.get(CONFIG))
    if not fields:
        raise CheckpointError(
            f"{checkpoint.path} holds a network of transformers, which {CONFIG} beside it must describe; put it there"
        )
    kind = str(fields.get("model_type"))
    if kind in FAMILIES and fields.get("auto_map"):
        raise CheckpointError(
            f"{source} asks for code of its own (auto_map), which is never run; if its network is {kind}'s unchanged, "
            "remove auto_map from it"
        )
    if kind not in FAMILIES:
        advice = ADVICE.get(kind, "export it to ONNX or pass it from Python as cdc_plugin.Backbone(module, ...)")
        raise CheckpointError(
            f"{source}: transformers' {shorten(kind)} is not read, only {', '.join(FAMILIES)}; {advice}"
        )
    family = FAMILIES[kind]
    vision = fields.get("vision_config", {})
    if kind in ("clip", "siglip"):
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{source}: vision_config holds settings by name; found {shorten(vision)}")
        fields = {**vision, **({"projection_dim": fields["projection_dim"]} if "projection_dim" in fields else {})}
    config = Config(fields, source, family.usual)
    config["num_channels"]
    return family, config, kind


def _check_windows(config: Config, side: int, kind: str) -> None:
    """Refuse sizes at which timm's Swin would pad its maps, or cut them, unlike transformers."""
    patch, window, stages = config["patch_size"], config["window_size"], range(len(config["depths"]))
    trained = config["image_size"] if kind == "swinv2" else side  # whose windows are kept whatever the images
    whole = side % (patch * 2 ** stages[-1]) == 0
    for stage in stages:
        maps, usual = side // patch // 2**stage, trained // patch // 2**stage
        whole = whole and maps % min(max(maps, 1), window) == 0 and min(maps, window) == min(usual, window)
    if not whole:
        raise CheckpointError(
            f"{config.source}: windows of {window} do not divide the maps of images of {side} px in every stage; state "
            f"another size in {PREPROCESSOR}, as the one the network was trained with"
        )


def _find_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the vision network, without what stands before their names."""
    prefix = next((found[1] for found in map(BEGINNING.match, state) if found), "")
    projection = {key: value for key, value in state.items() if key == "visual_projection.weight"}
    weights = {**strip_prefix(state, prefix), **projection}
    return {k: v for k, v in weights.items() if v.numel() and not UNUSED.match(k)}  # no register tokens are empty ones


def rename(state: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Return weights under other names, pattern by pattern."""
    renamed = {}
    for key, value in state.items():
        for pattern, name in names:
            key = re.sub(pattern, name, key)
        # Counted from one, and belonging to the stage that follows.
        key = re.sub(r"^encoder\.stages\.(\d+)\.layers\.", lambda m: f"layer{int(m[1]) + 1}.", key)
        key = re.sub(r"\.layer\.(\d)\.convolution\.", lambda m: f".conv{int(m[1]) + 1}.", key)
        key = re.sub(r"\.layer\.(\d)\.normalization\.", lambda m: f".bn{int(m[1]) + 1}.", key)
        key = re.sub(r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) + 1}.downsample.", key)
        renamed[key] = value
    return renamed


def arrange(state: dict[str, Tensor], spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return renamed weights in the shapes of timm's network: queries, keys and values as one, tokens as rows."""
    arranged = {key: value for key, value in state.items() if not re.search(r"\.attn\.[qkv]\.", key)}
    for key in state:
        if key.endswith(".attn.q.weight"):
            stem = key.removesuffix("q.weight")
            parts = [(state.get(f"{stem}{part}.weight"), state.get(f"{stem}{part}.bias")) for part in "qkv"]
            weights = [weight for weight, _ in parts if weight is not None]
            biases = [bias for _, bias in parts if bias is not None]
            arranged[f"{stem}qkv.weight"] = torch.cat(weights)
            if len(biases) == 2:  # keys have none
                arranged |= {f"{stem}q_bias": biases[0], f"{stem}v_bias": biases[1]}
            elif biases:
                arranged[f"{stem}qkv.bias"] = torch.cat(biases)
    for part in ("weight", "bias"):
        joined = arranged.pop(f"attn_pool.attention.in_proj_{part}", None)
        if joined is not None:
            third = len(joined) // 3
            arranged |= {f"attn_pool.q.{part}": joined[:third], f"attn_pool.kv.{part}": joined[third:]}
    for key in ("cls_token", "pos_embed"):
        if key in arranged and arranged[key].ndim < 3:
            arranged[key] = arranged[key].reshape(1, -1, arranged[key].shape[-1])
    if spec.get("kwargs", {}).get("no_embed_class") and {"cls_token", "pos_embed"} <= arranged.keys():
        positions = arranged["pos_embed"].float()
        arranged["cls_token"] = arranged["cls_token"].float() + positions[:, :1]
        arranged["pos_embed"] = positions[:, 1:]
    return {key: value.flatten() if ".grn." in key else value for key, value in arranged.items()}


def _read_preprocessor(
    checkpoint: Checkpoint, family: Family
) -> tuple[Side | None, Any, Any, set[str], dict[str, str]]:
    """Return side, mean and std that the folder states for images, which of them are stated, and the reasons."""
    own = payload_fields(checkpoint.sidecar.get(PREPROCESSOR))
    fields = own or payload_fields(payload_fields(checkpoint.sidecar.get(PROCESSOR)).get("image_processor"))
    name = PREPROCESSOR if own else PROCESSOR
    if not fields:
        why = dict.fromkeys(INPUT_FACTS, f"usual for this network, there is no {PREPROCESSOR}")
        return None, *family.normalised, set(), why
    source = str(checkpoint.path.with_name(name))
    given = [fields.get(f"image_{fact}") for fact in ("mean", "std")]
    given = [[value] * 3 if isinstance(value, float | int) else value for value in given]  # one for all channels
    mean, std = map(three_numbers, given)
    if any(value is not None and not numbers for value, numbers in zip(given, (mean, std), strict=True)):
        raise CheckpointError(f"{source}: image_mean and image_std take 3 numbers; found {shorten(given)}")
    stated = set(INPUT_FACTS) if mean and std else {"input_size"}
    if fields.get("do_normalize") is False:
        mean, std, stated = [0.0] * 3, [1.0] * 3, set(INPUT_FACTS)
    elif not (mean and std):
        mean, std = (list(numbers) for numbers in family.normalised)
    factor = 1 if fields.get("do_rescale") is False else fields.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float | int) or not 1e-6 <= factor <= 1:
        raise CheckpointError(f"{source}: rescale_factor lies between 1e-6 and 1; found {shorten(factor)}")
    _refuse_steps(fields, source)
    if abs(factor * 255 - 1) > 1e-4:  # pixels in [0, 1] are normalised in one step
        mean, std = ([number / (factor * 255) for number in numbers] for numbers in (mean, std))
    finite = all(math.isfinite(number) and abs(number) < 1e6 for number in (*mean, *std))
    if not finite or min(std) <= 0:
        raise CheckpointError(f"{source}: image_mean and image_std take 3 numbers; found {shorten([mean, std])}")
    side = read_resize(fields, source)
    why = dict.fromkeys(INPUT_FACTS, f"stated in {name}")
    return side, mean, std, stated, why | {"input_size": f"stated in {name}: {side.how}"}


def _refuse_steps(fields: Mapping[str, Any], source: str) -> None:
    """Refuse a preprocessor that does more to photos, or of a kind whose resizing is not known here."""
    more = [name for name, value in fields.items() if name.startswith("do_") and value is True and name not in STEPS]
    more += [name for name in ("rescale_offset",) if fields.get(name)]
    kind = fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViT"
    if more or not (isinstance(kind, str) and PROCESSORS.match(kind)):
        raise CheckpointError(
            f"{source}: its way to prepare photos is not read ({', '.join(more) or shorten(kind)}); write them as it "
            "makes them, squares in 8 bits, and state here a ViTImageProcessor's size, image_mean and image_std"
        )


def read_resize(fields: Mapping[str, Any], source: str) -> Side:
    """Return how a preprocessor of transformers makes squares of photos."""
    kind = str(fields.get("image_processor_type") or fields.get("feature_extractor_type"))
    keeps_shape = kind.startswith(("CLIP", "Bit", "ConvNe"))
    code = fields.get("resample", 3 if keeps_shape else 2)
    resample = PILLOW.get(code, "") if type(code) is int else ""
    if not resample or fields.get("do_resize") is False or fields.get("do_pad") is True:
        raise CheckpointError(
            f"{source}: photos are resized (resample 0 to 5, as Pillow counts) and not padded; found "
            f"{shorten({k: fields[k] for k in ('do_resize', 'resample', 'do_pad') if k in fields})}; write them as "
            "squares of the right size, and state do_resize true and do_pad false here"
        )
    size, shape = _read_side(fields.get("size"), source, keeps_shape)
    if kind.startswith("ConvNe"):
        share = fields.get("crop_pct")
        share = 224 / 256 if share is None else share
        if not isinstance(share, float | int) or not 0.1 <= share <= 1:
            raise CheckpointError(f"{source}: crop_pct lies between 0.1 and 1; found {shorten(share)}")
        return Side(size, int(size / share), resample) if size < 384 else Side(size, size, resample, squeezed=True)
    crop = fields.get("do_center_crop", kind.startswith(("CLIP", "Bit", "DeiT")))
    shown = _read_side(fields.get("crop_size"), source, False)[0] if crop is True else size
    if shown > size:
        raise CheckpointError(f"{source}: crop_size is at most size, {size}; found {shown}")
    return Side(shown, size, resample, squeezed=not shape)


def _read_side(value: Any, source: str, keeps_shape: bool) -> tuple[int, bool]:
    """Return the side that a size means, and whether it is that of the short edge alone."""
    if isinstance(value, Mapping):
        keeps_shape = "shortest_edge" in value
        edges = [value.get(name) for name in (("shortest_edge",) if keeps_shape else ("height", "width"))]
        edges += [f"{len(value)} edges"] if keeps_shape and len(value) > 1 else []  # a longest edge bounds the other
    else:
        edges = [224 if value is None else value]
    if type(edges[0]) is not int or not 8 <= edges[0] <= LARGEST_SIDE or edges[-1] != edges[0]:
        raise CheckpointError(f"{source}: size is that of a square, 8 to {LARGEST_SIDE} px; found {shorten(value)}")
    return edges[0], keeps_shape


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    if isinstance(allowed[0], bool | str):
        return type(value) is type(allowed[0]) and value in allowed
    kinds = int | float if isinstance(allowed[0], float) else int
    return isinstance(value, kinds) and not isinstance(value, bool) and allowed[0] <= value <= allowed[1]


def _describe(default: Any, allowed: tuple[Any, ...]) -> str:
    if isinstance(allowed[0], bool | str):
        return f"is one of {', '.join(map(repr, dict.fromkeys(allowed)))}"
    return f"lies between {allowed[0]} and {allowed[1]}{', a list' if isinstance(default, list) else ''}"


def _ratio(inner: int, width: int) -> float:
    """Return what times the width gives the inner width again, rounded down."""
    exact = inner / width
    return exact if int(width * exact) == inner else (inner + 0.25) / width

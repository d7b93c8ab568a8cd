"""Vision transformers under other names than timm's: what their weights tell of their network and their authors."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.checkpoints.read import Checkpoint, find_state_dict, payload_fields
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.data.side import Side
from cdc_plugin.errors import ConfigError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

TRANSFORMER = "blocks.0.attn.qkv.weight"
CONV_STEM = "patch_embed.proj.12.weight"  # the last of MoCo v3's convolutions, which come at two widths
MOCO_VITS = {384: "vit_small_patch16_224", 768: "vit_base_patch16_224"}
OTHER_NAMES = (
    (re.compile(r"^blocks\.\d+\.(?=\d+\.)"), "blocks."),  # DINOv2 trains blocks in chunks, and counts over all of them
    (re.compile(r"\.mlp\.w12\."), ".mlp.fc1."),
    (re.compile(r"\.mlp\.w3\."), ".mlp.fc2."),
)
# Usual depths; with others a block may have been lost, which no name or shape of the rest would show.
CONV_DEPTHS, DEPTHS = (11,), (12, 24, 32, 40)
IJEPA_VITS, PATCHES = (1280, 1408), "patch_embed.proj.weight"  # without a class token; of 16 heads each
MMPRETRAIN = "patch_embed.projection.weight"
MMPRETRAIN_NAMES = (
    (re.compile(r"^patch_embed\.projection\."), "patch_embed.proj."),
    (re.compile(r"^layers\."), "blocks."),
    (re.compile(r"^(ln|norm)1\."), "norm."),
    (re.compile(r"^(ln|norm)2\."), "fc_norm."),
    (re.compile(r"\.ln(\d)\."), r".norm\1."),
    (re.compile(r"\.attn\.gamma1\.weight$"), ".ls1.gamma"),
    (re.compile(r"\.ffn\.gamma2\.weight$"), ".ls2.gamma"),
    (re.compile(r"\.ffn\.(layers\.0\.0|w12)\."), ".mlp.fc1."),
    (re.compile(r"\.ffn\.(layers\.1|w3)\."), ".mlp.fc2."),
)
# Released files whose names say more than their weights do.
RELEASES = {r"dinov2_vit\w+_pretrain": "DINOv2", r"dino_(deit|vit)\w+_pretrain": "DINO", r"mae_\w+_vit": "MAE"}
# Authors whose code resizes position embeddings for a tenth of a patch more than it needs, or without smoothing.
SHIFTING, ROUGH = ("DINO", "iBOT", "DINOv2"), ("MAE", "mmpretrain", "transformers")
RESIZING = (*SHIFTING, *ROUGH)
POSITIONS = ("pos_embed", "encoder.pos_embedding", "network.pos_embed")


def rename_vit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a transformer under timm's names; others as they are.

    >>> list(rename_vit({"blocks.2.11.mlp.w3.bias": torch.ones(1)}))
    ['blocks.11.mlp.fc2.bias']
    """
    named = dict(state)
    for pattern, name in (*OTHER_NAMES, *(MMPRETRAIN_NAMES if MMPRETRAIN in state else ())):
        named = {pattern.sub(name, key): value for key, value in named.items()}
    return named if len(named) == len(state) else dict(state)


def find_variant(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]] | None:
    """Return timm's nearest model and its settings for a transformer that timm has no name for; else None."""
    inner, outer = state.get("blocks.0.mlp.fc1.weight"), state.get("blocks.0.mlp.fc2.weight")
    if inner is None or outer is None or TRANSFORMER not in state or inner.ndim != 2 or outer.ndim != 2:
        return None
    shape: dict[str, Any]
    width, depth = inner.shape[1], _count_blocks(state)
    if CONV_STEM in state and width in MOCO_VITS:
        side = 16 * math.isqrt(state.get("pos_embed", torch.ones(0)).numel() // width) or 224
        return MOCO_VITS[width], {"depth": depth, "num_heads": 12, "img_size": side}
    if width in IJEPA_VITS and "cls_token" not in state and PATCHES in state:
        patch, side = state[PATCHES].shape[-1], math.isqrt(state.get("pos_embed", torch.ones(1)).numel() // width)
        shape = {"embed_dim": width, "depth": depth, "num_heads": 16, "mlp_ratio": inner.shape[0] / width}
        pooled = {"class_token": False, "global_pool": "avg", "fc_norm": False}
        return "vit_base_patch16_224", {**shape, **pooled, "patch_size": patch, "img_size": side * patch}
    if inner.shape[0] == 2 * outer.shape[1] and width in (384, 768, 1024):  # DINOv2's SwiGLU, in timm for its giant
        shape = {"embed_dim": width, "depth": depth, "num_heads": width // 64}
        return "vit_giant_patch14_dinov2", shape | {"mlp_ratio": inner.shape[0] / width}
    return None


def has_odd_depth(state: Mapping[str, Tensor]) -> bool:
    """Return whether a transformer whose depth is counted, not known by its name, has an unusual one."""
    return find_variant(state) is not None and _count_blocks(state) not in (
        CONV_DEPTHS if CONV_STEM in state else DEPTHS
    )


def _count_blocks(state: Mapping[str, Tensor]) -> int:
    return len({key.split(".")[1] for key in state if key.startswith("blocks.")})


def infer_settings(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the settings of a model that bare weights imply: MoCo v3's small networks have 12 heads, not 3 or 6."""
    if variant := find_variant(state):
        return variant[1]
    return {"num_heads": 12} if hides_heads(state) and find_formula(state["pos_embed"]) == "MoCo v3" else {}


def hides_heads(state: Mapping[str, Tensor]) -> bool:
    """Return whether networks of this width and with fixed position embeddings are built with unlike heads."""
    attention = state.get(TRANSFORMER, torch.ones(1))
    narrow = attention.ndim == 2 and attention.shape[1] in (192, 384)
    return narrow and bool(find_formula(state.get("pos_embed")))


def find_formula(positions: Tensor | None) -> str:
    """Return whose fixed sines and cosines position embeddings are, MAE's or MoCo v3's; learned ones give nothing."""
    if positions is None or positions.ndim != 3 or positions.shape[2] % 4 or positions[:1].numel() < 16:
        return ""
    side, quarter = math.isqrt(positions.shape[1]), positions.shape[2] // 4
    extra = positions.shape[1] - side**2
    if positions[0, :extra].any():
        return ""
    angles = torch.outer(torch.arange(side).float(), 10000.0 ** -(torch.arange(quarter) / quarter))
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = waves.repeat_interleave(side, dim=0), waves.repeat(side, 1)
    for authors, halves in {"MoCo v3": (rows, columns), "MAE": (columns, rows)}.items():
        if torch.allclose(positions[0, extra:].float(), torch.cat(halves, dim=1), atol=2e-3):
            return authors
    return ""


def find_authors(checkpoint: Checkpoint) -> str:
    """Return whose code trained a transformer, by position embeddings, names in the file and the file's own name."""
    payload = payload_fields(checkpoint.payload)
    kind = payload_fields(checkpoint.sidecar.get("config.json")).get("model_type")
    if isinstance(kind, str):
        return "" if kind.endswith("registers") else "transformers"
    names = {*find_state_dict(checkpoint.payload)}
    last = {key.rpartition(".")[2] for key in names}
    if "classy_state_dict" in payload:
        return "VISSL"
    if any(key.endswith(MMPRETRAIN) for key in names):
        return "mmpretrain"
    positions = (value for key, value in checkpoint.state.items() if key.rpartition(".")[2] == "pos_embed")
    if formula := find_formula(next(positions, None)):
        return formula
    if {"target_encoder", "predictor"} <= payload.keys():
        return "I-JEPA"
    if "ibot_loss" in payload or "masked_embed" in last:
        return "iBOT"
    if "storage_tokens" in last:
        return "DINOv3"
    if "mask_token" in last and any(key.endswith(".ls1.gamma") for key in names):
        return "DINOv2"
    if "dino_loss" in payload:
        return "DINO"
    return next((authors for name, authors in RELEASES.items() if re.match(name, checkpoint.path.stem)), "")


def fixes_input(authors: str, size: int) -> bool:
    """Return whether these authors, and whoever uses their code at its sizes, normalise with ImageNet's statistics."""
    return authors not in ("", "mmpretrain", "VISSL") and size in (224, 518)  # those two have settings for it


def resize_positions(backbone: Backbone, size: int, authors: str = "") -> Backbone | None:
    """Return a transformer for images of another size, its position embeddings resized as its authors do.

    Those that resize none, such as MoCo v3's, get what timm does; a network without such embeddings gives None.
    """
    state = backbone.module.state_dict()
    name = next((name for name in POSITIONS if name in state), None)
    if name is None or backbone.spec is None:
        return None
    argument = "image_size" if name == POSITIONS[1] else "img_size"
    nested = "kwargs" if backbone.spec["family"] != "torchvision_vit" else None
    side = {argument: int(size)}
    changed = side if nested is None else {nested: {**backbone.spec.get("kwargs", {}), **side}}
    network, features = build({**backbone.spec, **changed})
    positions, expected = state[name], network.state_dict()[name]
    old, new = math.isqrt(positions.shape[1]), math.isqrt(expected.shape[1])
    if size * old != backbone.input_size * new:
        patch = backbone.input_size // old
        raise ConfigError(
            f"images of {size} px cannot be cut into this network's patches of {patch} px; "
            f"pass input_size={max(size // patch, 1) * patch} or another multiple"
        )
    extra = positions.shape[1] - old**2
    grid = positions[:, extra:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    registers = any(key.endswith("reg_token") for key in state)
    shifted = authors in SHIFTING and not registers  # DINOv2 gave that up when it added registers
    where: dict[str, Any] = {"scale_factor": (new + 0.1) / old} if shifted else {"size": new}
    grid = F.interpolate(grid, **where, mode="bicubic", antialias=not shifted and authors not in ROUGH)
    state[name] = torch.cat([positions[:, :extra], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    load_strictly(network, state, "the resized network")
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    if isinstance(backbone.input_size, Side) and not isinstance(size, Side):
        size = backbone.input_size.scaled(size)
    return Backbone(network, features, mean, std, size, {**backbone.spec, **changed}, backbone.inferred)

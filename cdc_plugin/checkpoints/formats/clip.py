"""CLIP as open_clip and OpenAI write it: state dicts, training checkpoints, TorchScript archives and hub folders."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.timm import knows, load_timm, three_numbers
from cdc_plugin.checkpoints.formats.transformers import CLIP_MEAN, CLIP_STD
from cdc_plugin.checkpoints.pool import WORDS
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import build_backbone, strip_prefix
from cdc_plugin.config.schema import LARGEST_SIDE
from cdc_plugin.data.side import RESAMPLING, Side
from cdc_plugin.errors import CheckpointError, option, shorten
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone

CONFIG = "open_clip_config.json"
BLOCK, ATTENTION, TRUNK = "transformer.resblocks.0.ln_1.weight", "attnpool.c_proj.weight", "visual.trunk."
# Which OpenAI's files hold beside the weights.
OPENAI = {"input_resolution", "context_length", "vocab_size"}
NAMES = (
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^conv1\.", "patch_embed.proj."),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^proj$", "head.weight"),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.ls_(\d)\.", r".ls\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
LAYERS = {"1": "conv1_1x1", "2": "conv2_kxk", "3": "conv3_1x1"}
# Width of the first stage and blocks of the third tell OpenAI's ResNets.
RESNETS = {
    **{(64, 6): "resnet50_clip", (64, 23): "resnet101_clip", (80, 10): "resnet50x4_clip"},
    **{(96, 18): "resnet50x16_clip", (128, 36): "resnet50x64_clip"},
}
# What a hub folder may say of its tower: what the weights or the code below speak for, and what only training needs.
KNOWN = {
    *("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value", "pool_type"),
    *("no_ln_pre", "final_ln_after_pool", "act_kwargs", "norm_kwargs", "attentional_pool", "attn_pooler_queries"),
    *("attn_pooler_heads", "patch_dropout", "pos_embed_type", "output_tokens", "block_type"),
    *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop"),
    *("timm_drop_path", "input_patchnorm", "global_average_pool"),
}
OTHERWISE = "pass it from Python as cdc_plugin.Backbone(module, ...), or take a CLIP model with a class token"


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether the vision tower of a CLIP model is there."""
    tower = _tower(checkpoint.state)
    return BLOCK in tower or ATTENTION in tower or any(key.startswith(TRUNK) for key in checkpoint.state)


def load_clip(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the vision tower of a CLIP model with its projection."""
    config = payload_fields(payload_fields(checkpoint.sidecar.get(CONFIG)).get("model_cfg"))
    tower, vision = _tower(checkpoint.state), payload_fields(config.get("vision_cfg"))
    source, released = str(checkpoint.path), checkpoint.state.keys() >= OPENAI
    if any(key.startswith(TRUNK) for key in checkpoint.state):
        loaded = _load_trunk(checkpoint, vision, wanted)
    else:
        if ATTENTION in tower:
            state, spec = _arrange_resnet(tower, source)
        else:
            state, spec = _arrange_transformer(tower, vision, source)
            exact = "gelu_tanh" if payload_fields(vision.get("act_kwargs")).get("approximate") == "tanh" else "gelu"
            spec["kwargs"]["act_layer"] = "quick_gelu" if _is_quick(config, released, wanted, source) else exact
        size = spec["kwargs"].get("img_size") or 32 * (math.isqrt(len(state["head.pos_embed"]) - 1))
        facts = (CLIP_MEAN, CLIP_STD, size, () if config or released else ("mean", "std"))
        backbone, matched = build_backbone(spec, state, source, *facts, wanted.partial)
        pool = "projection" if "projection" in spec else "class"
        why = {"features": f"{WORDS[pool]}, as its authors evaluate it"}
        loaded = Loaded(backbone, Origin("", why=why), matched=matched)
    backbone, why = _with_preprocessing(loaded.backbone, checkpoint, vision, released)
    writer = "OpenAI's CLIP" if released else "open_clip"
    epoch = whole_number(payload_fields(checkpoint.payload).get("epoch"))
    network = f"vision tower of CLIP, as {describe(backbone.spec)}"
    return replace(loaded, backbone=backbone, origin=Origin(writer, epoch, {**loaded.origin.why, **why}, network))


def _tower(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights of the vision tower, which may have been saved alone."""
    alone = "class_embedding" in state and BLOCK in state
    return state if alone or ATTENTION in state else strip_prefix(state, "visual.")


def _is_quick(config: Mapping[str, Any], released: bool, wanted: Wanted, source: str) -> bool:
    """Return whether a network was trained with OpenAI's approximation of GELU, which no weight reveals."""
    if wanted.arch is not None:
        return "quickgelu" in wanted.arch.lower()
    if released:
        return True
    if not config:
        raise CheckpointError(
            f"{source} does not say which GELU it was trained with; pass {option('arch', 'ViT-B-32-quickgelu')} for "
            f"the quick one (OpenAI, DFN, MetaCLIP), {option('arch', 'ViT-B-32')} for the exact one (LAION, DataComp)"
        )
    return config.get("quick_gelu") is True


def _arrange_transformer(
    tower: Mapping[str, Tensor], vision: Mapping[str, Any], source: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights under timm's names, and the spec that they and the folder's settings imply."""
    pool, eps, act = vision.get("pool_type") or "tok", vision.get("norm_kwargs") or {}, vision.get("act_kwargs") or {}
    unusual = [name for name, value in vision.items() if value and name not in KNOWN]
    unusual += [] if pool in ("tok", "avg") else ["pool_type"]
    unusual += [name for name in ("attentional_pool", "input_patchnorm", "global_average_pool") if vision.get(name)]
    unusual += [] if isinstance(eps, dict) and eps.keys() <= {"eps"} else ["norm_kwargs"]
    unusual += [] if act in ({}, {"approximate": "none"}, {"approximate": "tanh"}) else ["act_kwargs"]
    if unusual or any(key.startswith("attn_pool.") for key in tower):
        raise CheckpointError(
            f"{source} computes in a way that is not read ({', '.join(unusual) or 'attn_pool, as CoCa does'}); "
            f"{OTHERWISE}"
        )
    state: dict[str, Tensor] = {}
    for key, value in tower.items():
        name = key
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        state[name] = value
    patches, positions = state.get("patch_embed.proj.weight"), state.get("pos_embed")
    inner, token = state.get("blocks.0.mlp.fc1.weight"), state.get("cls_token")
    if patches is None or positions is None or inner is None or token is None or (patches.ndim, inner.ndim) != (4, 2):
        raise CheckpointError(f"{source} lacks the patches or positions of its transformer; copy it again")
    state["cls_token"], state["pos_embed"] = token.view(1, 1, -1), positions.unsqueeze(0)
    width, patch = patches.shape[0], patches.shape[-1]
    kwargs: dict[str, Any] = {
        **{"img_size": math.isqrt(max(len(positions) - 1, 1)) * patch, "patch_size": patch, "embed_dim": width},
        "depth": len({key.split(".")[1] for key in state if key.startswith("blocks.")}),
        "num_heads": find_heads(width, vision.get("head_width"), source),
        **{"mlp_ratio": inner.shape[0] / width, "global_pool": "avg" if pool == "avg" else "token"},
    }
    if vision.get("no_ln_pre") is True:
        kwargs["pre_norm"] = False
        state["patch_embed.proj.bias"] = patches.new_zeros(width)
    if pool == "avg":
        kwargs["fc_norm"] = vision.get("final_ln_after_pool") is True
        prefix = "fc_" if kwargs["fc_norm"] else ""
        state = {prefix + key if key.startswith("norm.") else key: value for key, value in state.items()}
    if "blocks.0.ls1.gamma" in state:
        kwargs["init_values"] = 1e-5
    layers = vision.get("layers")
    if isinstance(layers, int) and layers != kwargs["depth"]:
        raise CheckpointError(f"{source} has {kwargs['depth']} of {layers} layers; copy it again")
    spec = {"family": "timm", "name": "vit_base_patch16_clip_224", "kwargs": kwargs, "eps": eps.get("eps", 1e-5)}
    if "head.weight" in state:
        state["head.weight"] = state["head.weight"].T.contiguous()
        spec["projection"] = state["head.weight"].shape[0]
    return state, spec


def find_heads(width: int, head_width: Any, source: str) -> int:
    """Return the number of attention heads: by their width where it is stated, else the usual for a width."""
    if head_width is None:
        return 16 if width >= 1024 else max(width // 64, 1)
    if type(head_width) is not int or not 1 <= head_width <= width:
        raise CheckpointError(f"{source}: head_width lies between 1 and {width}; found {shorten(head_width)}")
    return width // head_width


def _arrange_resnet(tower: Mapping[str, Tensor], source: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a CLIP's ResNet under timm's names, and its spec."""
    first, blocks = tower.get("layer1.0.conv1.weight"), {key.split(".")[1] for key in tower if key[:7] == "layer3."}
    name = RESNETS.get((0 if first is None else first.shape[0], len(blocks)))
    if name is None:
        raise CheckpointError(f"{source} is none of CLIP's ResNets ({', '.join(RESNETS.values())}); copy it again")
    state = {}
    for key, value in tower.items():
        new = re.sub(r"^(conv|bn)(\d)\.", lambda m: f"stem.conv{m[2]}.{m[1]}.", key)
        new = re.sub(r"^layer(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.", new)
        new = re.sub(r"(?<=\d)\.(conv|bn)(\d)\.", lambda m: f".{LAYERS[m[2]]}.{m[1]}.", new)
        new = re.sub(r"\.downsample\.(\d)\.", lambda m: f".shortcut.conv.{'bn' if m[1] == '1' else 'conv'}.", new)
        new = re.sub(r"^attnpool\.positional_embedding$", "head.pos_embed", new)
        state[re.sub(r"^attnpool\.([qkvc])_proj\.", lambda m: f"head.{m[1].replace('c', 'proj')}.", new)] = value
    side = 32 * math.isqrt(max(len(state["head.pos_embed"]) - 1, 1))
    kwargs = {} if side == 224 else {"img_size": side}
    return state, {"family": "timm", "name": name, "kwargs": kwargs, "projection": len(tower[ATTENTION])}


def _load_trunk(checkpoint: Checkpoint, vision: Mapping[str, Any], wanted: Wanted) -> Loaded:
    """Return a tower that is a network of timm, with the projection that follows it, if any does."""
    source, name = str(checkpoint.path), wanted.arch or vision.get("timm_model_name")
    if name is not None and not (isinstance(name, str) and knows(name)):
        raise CheckpointError(f"{source}: timm has no model {shorten(name)}; correct timm_model_name")
    trunk, head = checkpoint.below(TRUNK), strip_prefix(checkpoint.state, "visual.head.")
    loaded = load_timm(replace(trunk, sidecar={}, payload=trunk.state), replace(wanted, arch=name))
    network: Any = loaded.backbone.module
    pool, usual = vision.get("timm_pool"), getattr(network, "global_pool", "avg")
    if pool not in (None, "", usual) or any(key.startswith("pool.") for key in head):
        raise CheckpointError(f"{source} pools by {shorten(pool or 'attention')}, expected {usual}; {OTHERWISE}")
    spec: dict[str, Any] = {"kwargs": {}, **(loaded.backbone.spec or {}), "family": "timm_tower", "head": "own"}
    last = next((head[key] for key in ("proj.weight", "mlp.fc2.weight") if key in head), None)
    own = [value for key, value in trunk.state.items() if key not in network.state_dict() and value.ndim == 2]
    if last is not None and last.ndim == 2:
        state = {key.removeprefix("visual."): value for key, value in checkpoint.state.items() if key[:7] == "visual."}
        several = "mlp.fc2.weight" in head
        spec |= {"head": "mlp" if several else "linear", "bias": f"{'mlp.fc2' if several else 'proj'}.bias" in head}
        spec |= {"projection": len(last)} | ({"hidden": last.shape[1]} if several else {})
    elif len(own) == 1 and not head:
        state, spec["projection"] = dict(trunk.state), len(own[0])
    elif own or head:
        raise CheckpointError(f"{source} projects in a way that is not read; {OTHERWISE}")
    else:
        pooled = "its attention pool" if usual == "map" else "what timm's network gives"
        return replace(loaded, origin=replace(loaded.origin, why={**loaded.origin.why, "features": pooled}))
    old = loaded.backbone
    facts = (old.mean.tolist(), old.std.tolist(), old.input_size, old.inferred)
    backbone, matched = build_backbone(spec, state, source, *facts, wanted.partial)
    why = {**loaded.origin.why, "features": f"{WORDS['projection']}, as its authors evaluate it"}
    return replace(loaded, backbone=backbone, matched=matched, origin=replace(loaded.origin, why=why))


def _with_preprocessing(
    backbone: Backbone, checkpoint: Checkpoint, vision: Mapping[str, Any], released: bool
) -> tuple[Backbone, dict[str, str]]:
    """Return the network with the images that the folder states, or CLIP's own."""
    fields = payload_fields(payload_fields(checkpoint.sidecar.get(CONFIG)).get("preprocess_cfg"))
    source = checkpoint.path.with_name(CONFIG)
    mean, std = (three_numbers(fields.get(name)) for name in ("mean", "std"))
    resample, mode = fields.get("interpolation", "bicubic"), fields.get("resize_mode", "shortest")
    fixed = backbone.input_size if "input_size" not in backbone.inferred else None
    size = fields.get("size", fixed or vision.get("image_size", backbone.input_size))
    size = size[0] if isinstance(size, list) and len(set(map(str, size))) == 1 else size
    if resample not in RESAMPLING or mode not in ("shortest", "squash") or type(size) is not int:
        found = {k: fields[k] for k in ("interpolation", "resize_mode", "size") if k in fields}
        raise CheckpointError(
            f"{source}: photos are resized to a square, by {', '.join(RESAMPLING)}; found {shorten(found)}; write them "
            'as squares of the right size, and state "resize_mode": "squash" here'
        )
    if size != (fixed or size) or not 8 <= size <= LARGEST_SIDE:
        raise CheckpointError(f"{source}: size is {fixed or 'at least 8'} for its network; found {shorten(size)}")
    if mean and std and not all(math.isfinite(number) for number in (*mean, *std)):
        raise CheckpointError(f"{source}: mean and std take 3 numbers; found {shorten([mean, std])}")
    side = Side(int(size), int(size), resample, squeezed=mode == "squash")
    stated = f"stated in {CONFIG}" if fields else "as OpenAI trains" if released else "CLIP's, the file states none"
    why = dict.fromkeys(("mean", "std"), stated) | {"input_size": side.how}
    inferred = [name for name in backbone.inferred if name not in ("input_size", *(("mean", "std") if fields else ()))]
    facts = (mean or CLIP_MEAN, std or CLIP_STD, side, backbone.spec, inferred)
    return Backbone(backbone.module, backbone.feature_dim, *facts), why

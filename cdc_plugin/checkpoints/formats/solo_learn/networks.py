"""Find the network of solo-learn that weights belong to: as the run states it, else by names and shapes."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats.solo_learn.args import CIFARS, RunArgs
from cdc_plugin.checkpoints.formats.torchvision import RESNETS, is_resnet, resnet_spec
from cdc_plugin.errors import CheckpointError, option

# Width and depth of a ViT; width of the first stage and depths of a Swin or ConvNeXt; depths and widths.
VITS = {"vit_tiny": (192, 12), "vit_small": (384, 12), "vit_base": (768, 12), "vit_large": (1024, 24)}
SWINS = {
    "swin_tiny": (96, [2, 2, 6, 2]),
    "swin_small": (96, [2, 2, 18, 2]),
    "swin_base": (128, [2, 2, 18, 2]),
    "swin_large": (192, [2, 2, 18, 2]),
}
CONVNEXTS = {
    "convnext_tiny": (96, [3, 3, 9, 3]),
    "convnext_small": (96, [3, 3, 27, 3]),
    "convnext_base": (128, [3, 3, 27, 3]),
    "convnext_large": (192, [3, 3, 27, 3]),
}
POOLFORMERS = {
    "poolformer_s12": ([2, 2, 6, 2], [64, 128, 320, 512]),
    "poolformer_s24": ([4, 4, 12, 4], [64, 128, 320, 512]),
    "poolformer_s36": ([6, 6, 18, 6], [64, 128, 320, 512]),
    "poolformer_m36": ([6, 6, 18, 6], [96, 192, 384, 768]),
    "poolformer_m48": ([8, 8, 24, 8], [96, 192, 384, 768]),
}
WIDE_RESNETS = {"wide_resnet28w2": 2, "wide_resnet28w8": 8}
# One key per kind that no other kind has.
MARKS = {
    "vit": "blocks.0.attn.qkv.weight",
    "swin": "layers.0.blocks.0.attn.relative_position_bias_table",
    "convnext": "stages.0.blocks.0.conv_dw.weight",
    "poolformer": "network.0.0.layer_scale_1",
    "wide_resnet": "block1.layer.0.conv1.weight",
}
MANY_HEADS = ("mae", "mocov3")  # methods whose small ViTs have 12 attention heads, not 3 or 6, at the same shapes
METHODS = (
    *("all4one", "barlow_twins", "base", "byol", "deepclusterv2", "dino", "mae", "mocov2plus", "mocov3", "nnbyol"),
    *("nnclr", "nnsiam", "ressl", "simclr", "simsiam", "supcon", "swav", "vibcreg", "vicreg", "wmse"),
)
# Settings that matter in training only.
TRAINING_ONLY = ("drop", "attn_drop", "proj_drop", "pos_drop", "patch_drop", "weight_init", "num_classes", "pretrained")


@dataclass(frozen=True)
class Network:
    """A network to build, its weights under the names used there, what was inferred, the image size that it fixes."""

    spec: dict[str, Any]
    weights: dict[str, Tensor]
    inferred: tuple[str, ...] = ()
    size: int | None = None
    why: dict[str, str] = field(default_factory=dict)


def find_kind(weights: Mapping[str, Tensor]) -> str | None:
    """Return the kind of network that has these names; None for one that solo-learn does not have."""
    if is_resnet(weights):
        return "resnet"
    return next((kind for kind, key in MARKS.items() if key in weights), None)


def find_network(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, reconstructs: bool) -> Network:
    """Return the network of weights, by its name or by shapes; one that ``reconstructs`` has a decoder, as in mae."""
    kind = find_kind(weights)
    stated = next((other for other, names in NAMES.items() if name in names), kind)
    if kind is None or stated != kind:
        actual = f"the weights of a {kind}" if kind else "other or incomplete weights"
        raise CheckpointError(f"args.json or arch says {name}, found {actual}; do the files belong together?")
    try:
        return FINDERS[kind](weights, run, name if name in NAMES[kind] else None, reconstructs)
    except (KeyError, IndexError, ValueError) as error:  # a key or a dimension that every such network has
        raise CheckpointError(
            f"the weights of a {kind} are incomplete ({error}); copy or download the file again"
        ) from error


def _resnet(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, _reconstructs: bool) -> Network:
    spec, open_facts = resnet_spec(weights)
    kwargs = run.kwargs if run else {}
    if any(kwargs.get("replace_stride_with_dilation") or ()):
        raise CheckpointError("a ResNet with replace_stride_with_dilation cannot be rebuilt; train one without it")
    if name is not None and not {"groups", "width_per_group"} & set(kwargs):
        block, depths = RESNETS[name]
        spec |= {"block": block, "depths": depths, "widths": [64, 128, 256, 512]}
        if block == "bottleneck":
            spec |= {"groups": 1, "width_per_group": 64}
    elif (spec["block"], spec["depths"]) not in RESNETS.values():
        raise CheckpointError(
            f"no ResNet has {spec['depths']} {spec['block']} blocks; copy it again or pass {option('arch', 'NAME')}"
        )
    kernel, dataset = spec["stem"]["kernel"], run.dataset if run else None
    if dataset in CIFARS and kernel != 3:
        raise CheckpointError(
            f"args.json says {dataset}, so a 3x3 stem, found {kernel}x{kernel}; is the file complete?"
        )
    if kernel != 3:
        return Network(spec, weights, open_facts, why={"stem": "the usual one for its size"})
    if dataset in CIFARS:
        assert run is not None
        spec["stem"] |= {"padding": 1 if run.fork else 2, "stride": 1, "pool": False}
        writer = "CDC's version of solo-learn" if run.fork else "solo-learn"
        return Network(spec, weights, why={"stem": f"as {writer} builds it for {dataset}"})
    fork = (run.fork if run else False) or (spec["block"], spec["depths"]) == RESNETS["resnet34"]
    spec["stem"]["padding"] = 1 if fork else 2
    if dataset is None:
        spec["stem"] |= {"stride": 1, "pool": False}
        open_facts = ("stem.padding",)
    return Network(spec, weights, open_facts, why={"stem": "as solo-learn builds it for CIFAR; images can settle it"})


def _vit(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, reconstructs: bool) -> Network:
    width, _, patch = weights["patch_embed.proj.weight"].shape[:3]
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    # In July 2022 vit_tiny and vit_small of mocov3 were swapped, so shapes count more than the name.
    by_shape = next((other for other, sizes in VITS.items() if sizes == (width, depth)), None)
    if by_shape is None:
        raise CheckpointError(
            f"solo-learn has no ViT of width {width} and {depth} blocks; pass {option('arch', 'NAME')} of timm"
        )
    kwargs = _settings(run, "patch_size", "img_size")
    if run is not None and (run.nested or kwargs):
        kwargs = {"patch_size": 16, "img_size": 224} | kwargs
    else:
        tokens = weights["pos_embed"].shape[1] - ("cls_token" in weights)
        kwargs = {"patch_size": patch, "img_size": math.isqrt(tokens) * patch}
        if "fc_norm.weight" in weights or "cls_token" not in weights:
            kwargs |= {"global_pool": "avg", "class_token": "cls_token" in weights}
    if _many_heads(weights, run, reconstructs) and by_shape in ("vit_tiny", "vit_small"):
        kwargs["num_heads"] = 12
    spec = {"family": "timm", "name": f"{by_shape}_patch16_224", "kwargs": kwargs}
    if {"norm.weight", "fc_norm.weight"} <= set(weights):
        spec["family"] = "twice_normed_vit"
    return Network(spec, weights, size=_side(kwargs["img_size"]))


def _many_heads(weights: Mapping[str, Tensor], run: RunArgs | None, reconstructs: bool) -> bool:
    if run is not None and run.nested and (run.linear or run.method in METHODS):
        return run.method in MANY_HEADS
    # Fixed position embeddings, as in these methods, are 0 for the class token; learned ones never are.
    positions = weights.get("pos_embed", torch.ones(1, 1, 1))
    return reconstructs or (positions.ndim == 3 and not positions[:, 0].any())


def _swin(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, _reconstructs: bool) -> Network:
    name = name or _by_stages(SWINS, weights["patch_embed.proj.weight"].shape[0], weights, "layers")
    kwargs = _settings(run, "img_size", "window_size")
    inferred: tuple[str, ...] = ()
    if run is not None and (run.nested or kwargs):
        kwargs = {"img_size": 224, "window_size": 7} | kwargs
    else:
        tables = [weights[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"] for stage in range(4)]
        windows = [(math.isqrt(table.shape[0]) + 1) // 2 for table in tables]  # ((2 window - 1)^2, heads)
        side = _swin_side(weights, windows)
        inferred = () if side else ("input_size",)
        kwargs = {"img_size": side or 224, "window_size": windows[0]}
    # Newer releases of timm do not store what follows from the sizes, and count a stage's downsampling as part of
    # the next one.
    kept = {key: value for key, value in weights.items() if not key.endswith(("attn_mask", "relative_position_index"))}
    if any(key.startswith("layers.0.downsample.") for key in kept):
        later = re.compile(r"(?<=layers\.)\d(?=\.downsample)")
        kept = {later.sub(lambda stage: str(int(stage[0]) + 1), key): value for key, value in kept.items()}
    spec = {"family": "timm", "name": f"{name}_patch4_window7_224", "kwargs": kwargs}
    return Network(spec, kept, inferred, size=None if inferred else _side(kwargs["img_size"]))


def _swin_side(weights: Mapping[str, Tensor], windows: list[int]) -> int | None:
    """Return the side of the images: a window is cut to the size of its map, and older releases stored the masks."""
    cut = next((stage for stage, window in enumerate(windows) if window < windows[0]), None)
    if cut is not None:
        return windows[cut] * 4 * 2**cut
    mask = weights.get("layers.0.blocks.1.attn_mask")  # (windows, window^2, window^2)
    return None if mask is None else 4 * windows[0] * math.isqrt(mask.shape[0])


def _convnext(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, _reconstructs: bool) -> Network:
    name = name or _by_stages(CONVNEXTS, weights["stem.0.weight"].shape[0], weights, "stages")
    return Network({"family": "timm", "name": name, "kwargs": _settings(run)}, weights)


def _poolformer(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, _reconstructs: bool) -> Network:
    settings = _settings(run)
    unknown = set(settings) - {"pool_size", "img_size", "layer_scale_init_value"}
    if unknown:
        raise CheckpointError(
            f"a poolformer built with {', '.join(sorted(unknown))} cannot be rebuilt; train one without it"
        )
    if name is None:
        stages = ("0", "2", "4", "6")
        depths = [len({k.split(".")[2] for k in weights if k.startswith(f"network.{stage}.")}) for stage in stages]
        widths = [weights[f"network.{stage}.0.layer_scale_1"].shape[0] for stage in stages]
        if (depths, widths) not in POOLFORMERS.values():
            raise CheckpointError(f"no poolformer has depths {depths} and widths {widths}; is the file complete?")
    else:
        depths, widths = POOLFORMERS[name]
    kwargs = {"depths": depths, "widths": widths, "pool": settings.get("pool_size", 3)}
    return Network({"family": "poolformer", "kwargs": kwargs}, weights)


def _wide_resnet(weights: dict[str, Tensor], run: RunArgs | None, name: str | None, _reconstructs: bool) -> Network:
    widen = WIDE_RESNETS[name] if name else weights["block1.layer.0.conv1.weight"].shape[0] // 16
    kwargs = {"depth": 28, "widen": widen, "first_stride": _settings(run).get("first_stride", 1)}
    return Network({"family": "wide_resnet", "kwargs": kwargs}, weights)


def _settings(run: RunArgs | None, *sides: str) -> dict[str, Any]:
    """Return the settings that the network's output depends on, sides of a square as one number."""
    stated = {} if run is None else run.kwargs
    kept = {k: v for k, v in stated.items() if v is not None and k.removesuffix("_rate") not in TRAINING_ONLY}
    return kept | {side: _side(kept[side]) for side in sides if side in kept}


def _side(value: Any) -> int:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise CheckpointError(
            f"expected the side of a square image in args.json, found {value!r}; was the file edited?"
        )
    if len(set(numbers)) != 1:
        raise CheckpointError(f"the network was trained on images of {value}; only square ones are supported")
    return int(numbers[0])


def _by_stages(names: Mapping[str, tuple[int, list[int]]], width: int, weights: Mapping[str, Tensor], key: str) -> str:
    depths = [
        len({name.split(".")[3] for name in weights if name.startswith(f"{key}.{stage}.blocks.")}) for stage in range(4)
    ]
    name = next((name for name, sizes in names.items() if sizes == (width, depths)), None)
    if name is None:
        raise CheckpointError(
            f"solo-learn has no network of this kind with width {width} and depths {depths}; is the file complete?"
        )
    return name


Finder = Callable[[dict[str, Tensor], RunArgs | None, str | None, bool], Network]
FINDERS: dict[str, Finder] = {
    **{"resnet": _resnet, "vit": _vit, "swin": _swin, "convnext": _convnext},
    **{"poolformer": _poolformer, "wide_resnet": _wide_resnet},
}
NAMES: dict[str, Mapping[str, Any]] = {
    **{"resnet": RESNETS, "vit": VITS, "swin": SWINS, "convnext": CONVNEXTS},
    **{"poolformer": POOLFORMERS, "wide_resnet": WIDE_RESNETS},
}

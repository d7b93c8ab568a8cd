"""State dicts with torchvision's names: any ResNet by its shapes, other classifiers by comparison with the library."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.branches import take_bare_branch
from cdc_plugin.checkpoints.formats.base import CheckpointFormat, Loaded, Origin, Wanted
from cdc_plugin.checkpoints.infer.from_weights import pool_by_weights
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import HEAD_PREFIXES, build_backbone, compare
from cdc_plugin.errors import CheckpointError, UserError, option
from cdc_plugin.models.architectures import STEM, image_size_default, skeleton

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BLOCK_PARTS = re.compile(r"layer[1-4]\.\d+\.(conv[123]|bn[123]|downsample\.[01])\.\w+")
# The torchvision models that a key may belong to, where only they have it.
TRANSFORMER = "encoder.layers.encoder_layer_0.ln_1.weight"
CANDIDATES = {
    TRANSFORMER: ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"),
    "trunk_output.block1.block1-0.proj.0.weight": tuple(
        f"regnet_{kind}_{size}" for kind in "xy" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")
    ),
    "features.denseblock1.denselayer1.norm1.weight": tuple(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "features.1.0.layer_scale": ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    "features.1.0.attn.relative_position_bias_table": tuple(f"swin_{size}" for size in "tsb"),
    "features.1.0.attn.cpb_mlp.0.weight": tuple(f"swin_v2_{size}" for size in "tsb"),
    "layers.8.0.layers.0.weight": tuple(f"mnasnet{width}" for width in ("0_5", "0_75", "1_0", "1_3")),
    "features.1.conv.0.0.weight": ("mobilenet_v2",),
    "features.1.block.0.0.weight": ("mobilenet_v3_small", "mobilenet_v3_large"),
    "features.1.0.block.0.0.weight": (
        *(f"efficientnet_b{number}" for number in range(8)),
        *(f"efficientnet_v2_{size}" for size in "sml"),
    ),
    "stage2.0.branch1.0.weight": tuple(f"shufflenet_v2_x{width}" for width in ("0_5", "1_0", "1_5", "2_0")),
    "features.0.weight": tuple(f"vgg{n}{bn}" for n in (11, 13, 16, 19) for bn in ("", "_bn")),
}
# The usual number of attention heads by width; no shape reveals it.
USUAL_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}
RESNETS = {
    "resnet18": ("basic", [2, 2, 2, 2]),
    "resnet34": ("basic", [3, 4, 6, 3]),
    "resnet50": ("bottleneck", [3, 4, 6, 3]),
    "resnet101": ("bottleneck", [3, 4, 23, 3]),
    "resnet152": ("bottleneck", [3, 8, 36, 3]),
}
# Networks of timm that have the same weights, yet blur or average before they subsample.
TWINS = {"resnet18": ("resnetblur18",), "resnet50": ("resnetaa50", "resnetblur50")}
NAME_KEYS = ("arch", "architecture", "model_name", "model")  # under which training scripts state a network
# Known depths; with others a block may have been lost, which every strict load would accept.
RESNET_DEPTHS = ([1, 1, 1, 1], [3, 24, 36, 3], *(depths for _, depths in RESNETS.values()))
TRANSFORMER_DEPTHS = (6, 12, 24, 32)


def is_resnet(state: Mapping[str, Tensor]) -> bool:
    """Return whether the names are those of torchvision's ResNet; other parts in its blocks make another network."""
    anchors = ("conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer4.0.conv1.weight")
    inside = [key for key in state if re.match(r"layer\d+\.\d+\.", key)]
    return all(key in state for key in anchors) and all(BLOCK_PARTS.fullmatch(key) for key in inside)


def resnet_spec(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the spec of the ResNet with these shapes, and the facts about its stem that shapes leave open."""
    try:
        return _resnet_by_shapes(state)
    except (KeyError, ValueError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(
            f"expected the weights of a ResNet, found some missing or misshapen ({error}); copy the file again"
        ) from error


def _resnet_by_shapes(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], tuple[str, ...]]:
    stages = range(1, 5)
    depths = [len({k.split(".")[1] for k in state if k.startswith(f"layer{stage}.")}) for stage in stages]
    spec: dict[str, Any] = {"family": "resnet", "block": "basic", "depths": depths}
    if "layer1.0.conv3.weight" in state:
        widths = [state[f"layer{stage}.0.conv3.weight"].shape[0] // 4 for stage in stages]
        inner, per_group = state["layer1.0.conv2.weight"].shape[:2]
        groups = inner // per_group
        spec |= {"block": "bottleneck", "groups": groups, "width_per_group": 64 * inner // (groups * widths[0])}
    else:
        widths = [state[f"layer{stage}.0.conv1.weight"].shape[0] for stage in stages]
    stem_width, channels, kernel, _ = state["conv1.weight"].shape
    if channels != 3:
        raise CheckpointError(f"expected a network for RGB images (3 channels), found conv1 with {channels} channels")
    if kernel % 2 == 0:
        raise CheckpointError(
            f"expected a first convolution of 3x3 or 7x7, found {kernel}x{kernel}; copy the file again"
        )
    spec["widths"] = widths
    spec["stem"] = {"kernel": kernel, "stride": 2, "padding": kernel // 2, "pool": True}
    if stem_width != widths[0]:
        spec["stem"]["width"] = stem_width
    if kernel >= 7:
        return spec, ()
    # A small stem is for small images; torchvision has none, and projects do not agree on the rest of it.
    spec["stem"] |= {"stride": 1, "pool": pool_by_weights(state).kept}
    return spec, ("stem.pool", "stem.padding", "stem.stride")


def identify(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return the spec of the torchvision network, other than a ResNet, that has these names and shapes."""
    names = [name for anchor, names in CANDIDATES.items() if anchor in state for name in names]
    specs = [_named_spec(name, state) for name in names]
    if TRANSFORMER in state and (by_shapes := _transformer_by_shapes(state)) is not None:
        specs.append(by_shapes)
    for spec in specs:
        try:
            if not compare(skeleton(spec), state):
                return spec
        except UserError:  # no such network can be built for these shapes
            continue
    return None


def load_torchvision(checkpoint: Checkpoint, wanted: Wanted, stem: Mapping[str, Any] | None = None) -> Loaded:
    """Return a backbone under torchvision's names, fed as for ImageNet; older names may have shown its ``stem``."""
    checkpoint, why = take_bare_branch(checkpoint, wanted.branch)
    state, arch = checkpoint.state, wanted.arch
    open_facts: tuple[str, ...] = ()
    spec: dict[str, Any] | None
    if arch is not None and not torchvision_knows(arch):
        raise CheckpointError(
            f"torchvision has no {arch!r}, and {checkpoint.path} has a ResNet's stem of its own: "
            f"leave out {option('arch', arch)}"
        )
    if is_resnet(state):
        spec, open_facts = resnet_spec(state)
        if spec["depths"] not in RESNET_DEPTHS and not wanted.partial:
            raise CheckpointError(
                f"{checkpoint.path} has {spec['depths']} blocks per stage, unlike any known ResNet: copy it again "
                f"or, if it was built so, pass {option('partial_weights')}"
            )
        spec["stem"] |= stem or {}
        open_facts = tuple(fact for fact in open_facts if fact.removeprefix("stem.") not in (stem or {}))
        if arch is not None:
            _check_named_resnet(arch, spec, checkpoint)
    else:
        spec = _named_spec(arch, state) if arch is not None else identify(state)
    if spec is None:
        raise CheckpointError(
            f"{checkpoint.path} has the names of no known torchvision network; pass {option('arch', 'NAME')}"
        )
    size = spec.get("kwargs", spec).get("image_size")
    if spec["family"] == "torchvision_vit":
        open_facts = ("heads",)
    twins = () if arch else _find_twins(spec, checkpoint)
    open_facts += ("network",) if twins else ()
    inferred = ("mean", "std", *(() if size else ("input_size",)), *open_facts)
    facts = (IMAGENET_MEAN, IMAGENET_STD, size or image_size_default(spec), inferred)
    backbone, matched = build_backbone(spec, state, str(checkpoint.path), *facts, wanted.partial)
    why |= dict.fromkeys(("mean", "std"), "ImageNet's, the file does not state them")
    why["input_size"] = "inferred from its position embeddings" if size else "usual for this network"
    if "heads" in open_facts:
        why["heads"] = f"{spec['num_heads']}, usual for a width of {spec['hidden_dim']}; no weight reveals it"
    elif stem:
        why["stem"] = "inferred from the names of its layers"
    elif "stem.pool" in open_facts:
        why["stem"] = "inferred from the shape of conv1 and BatchNorm statistics; images can settle it"
    if twins:
        why["network"] = f"assumed; {' and '.join(twins)} of timm have the same weights: {option('arch', 'NAME')}"
    return Loaded(backbone, Origin("torchvision", why=why), matched=matched)


def _find_twins(spec: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the networks that the weights may belong to as well, unless the file or its name says which one it is."""
    plain = {"family": "resnet", "widths": [64, 128, 256, 512], "groups": 1, "width_per_group": 64, "stem": STEM}
    shapes = {name: plain | {"block": block, "depths": depths} for name, (block, depths) in RESNETS.items()}
    name = next((name for name, shape in shapes.items() if shape == plain | dict(spec)), "")
    payload = payload_fields(checkpoint.payload)
    stated = any(payload.get(key) == name for key in NAME_KEYS) or re.search(rf"{name}(?!\d)", checkpoint.path.stem)
    return () if stated else TWINS.get(name, ())


def _named_spec(name: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    spec: dict[str, Any] = {"family": "torchvision", "name": name}
    side = _transformer_side(state)
    return spec if side is None else spec | {"kwargs": {"image_size": side}}


def _transformer_side(state: Mapping[str, Tensor]) -> int | None:
    """Return the side of the images that the position embeddings of a vision transformer are for."""
    positions, patches = state.get("encoder.pos_embedding"), state.get("conv_proj.weight")
    if positions is None or patches is None or (positions.ndim, patches.ndim) != (3, 4):
        return None
    return math.isqrt(max(positions.shape[1] - 1, 0)) * patches.shape[-1]


def _transformer_by_shapes(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return the spec of a vision transformer that torchvision does not name, with the usual heads for its width."""
    side, inner = _transformer_side(state), state.get("encoder.layers.encoder_layer_0.mlp.0.weight")
    if side is None or inner is None:
        return None
    width, _, _, patch = state["conv_proj.weight"].shape
    layers = {key.split(".")[2] for key in state if key.startswith("encoder.layers.")}
    if width not in USUAL_HEADS or len(layers) not in TRANSFORMER_DEPTHS:
        return None
    spec = {"family": "torchvision_vit", "image_size": side, "patch_size": patch, "num_layers": len(layers)}
    return spec | {"num_heads": USUAL_HEADS[width], "hidden_dim": width, "mlp_dim": inner.shape[0]}


def _check_named_resnet(arch: str, spec: dict[str, Any], checkpoint: Checkpoint) -> None:
    from torchvision import models

    with torch.device("meta"):
        expected = models.get_model(arch, weights=None).state_dict()
    actual = skeleton(spec).state_dict()
    # The stem may be adapted to small images and the widths reduced; other blocks are another network.
    if {k for k in expected if not k.startswith(HEAD_PREFIXES)} != set(actual):
        raise CheckpointError(
            f"{option('arch', arch)} does not fit {checkpoint.path}: it is a ResNet of {spec['block']} blocks, "
            f"{spec['depths']} per stage; leave it out"
        )


def _matches(checkpoint: Checkpoint) -> bool:
    return is_resnet(checkpoint.state) or identify(checkpoint.state) is not None


def torchvision_knows(arch: str) -> bool:
    """Return whether torchvision has an image classifier of this name."""
    from torchvision import models

    return arch in models.list_models(module=models)


TORCHVISION = CheckpointFormat(_matches, load_torchvision, torchvision_knows)

"""State dicts of timm models, named by the user or by files beside them, or told by names and shapes."""

from __future__ import annotations

import fnmatch
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor

from cdc_plugin.checkpoints.architectures import build, describe, skeleton, timm_features, timm_input
from cdc_plugin.checkpoints.formats import CheckpointFormat, Loaded, Origin, Wanted, formats
from cdc_plugin.checkpoints.reader import Checkpoint, payload_fields
from cdc_plugin.checkpoints.strict import compare, load_strictly, load_weights
from cdc_plugin.checkpoints.torchvision_nets import is_resnet
from cdc_plugin.errors import UserError
from cdc_plugin.model import Backbone

# Names worth comparing, by a key that all of them have; building every timm model would take minutes.
SHORTLISTS = {
    "conv_stem.weight": (
        *(
            "efficientnet_b[0-4]",
            "efficientnet_lite[0-4]",
            "tf_efficientnet_b[0-4]",
            "tf_efficientnet_lite[0-4]",
        ),
        *("tf_efficientnetv2_b[0-3]", "efficientnetv2_rw_[st]", "mobilenetv2_[015]*", "mobilenetv3_*_[01]*"),
    ),
    "conv1.0.weight": (
        "resnet*[dt]",
        "resnet*ts",
        "test_resnet",
        "seresnet*[dt]",
        "ecaresnet*[dt]",
        "resnext*d_*",
    ),
    "layer1.0.se.fc1.weight": ("seresnet*", "seresnext*"),
    "layers.0.blocks.0.attn.relative_position_bias_table": ("swin_*", "swin_s3_*"),
    "stages.0.blocks.0.conv_dw.weight": ("convnext_*", "convnextv2_*"),
    "s1.b1.conv1.conv.weight": ("regnetx_*", "regnety_*"),
    "stages.0.blocks.0.norm1.weight": ("resnetv2_*",),
}
VIT_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
INPUT_FACTS = ("mean", "std", "input_size")
TRANSFORMER = "blocks.0.attn.qkv.weight"


def stated_arch(checkpoint: Checkpoint) -> str | None:
    """The timm name that the checkpoint, or a file that timm wrote beside it, states."""
    payload = payload_fields(checkpoint.payload)
    # timm's train.py writes a version and its arguments; a bare "arch" is as often a torchvision name.
    own = payload.get("arch") if {"version", "args"} & set(payload) else None
    config = payload_fields(checkpoint.sidecar.get("config.json")).get("architecture")
    beside = payload_fields(checkpoint.sidecar.get("args.yaml"))
    named = [name for name in (own, config, beside.get("model")) if isinstance(name, str)]
    return next((name for name in named if knows(name)), None)


def knows(name: str) -> bool:
    """Whether timm has a model of this name; a pretraining tag after a dot does not count."""
    import timm

    return bool(timm.is_model(name.split(".")[0]))


def timm_spec(name: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The spec of a named model, with the image side that its position embeddings were stored for."""
    spec: dict[str, Any] = {"family": "timm", "name": name.split(".")[0], "kwargs": {}}
    if "fc_norm.weight" in state and TRANSFORMER in state:
        spec["kwargs"]["global_pool"] = "avg"
    stored, patches = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    if stored is None or patches is None or stored.ndim != 3:
        return spec
    usual = skeleton(spec).state_dict().get("pos_embed")
    if usual is None or usual.shape == stored.shape:
        return spec
    prefix = usual.shape[1] - math.isqrt(usual.shape[1]) ** 2  # class and register tokens beside the square grid
    spec["kwargs"]["img_size"] = math.isqrt(stored.shape[1] - prefix) * patches.shape[-1]
    return spec


def fits(name: str, state: Mapping[str, Tensor]) -> bool:
    """Whether a model has exactly these names and shapes, its classifier aside."""
    try:
        return not compare(skeleton(timm_spec(name, state)), state)
    except UserError:
        return False


def identify(checkpoint: Checkpoint) -> str:
    """The timm name of a bare state dict: said by the file's name, or the only network that fits."""
    for name in _names_in(checkpoint.path.stem):
        if fits(name, checkpoint.state):
            return name
    fitting = [name for name in shortlist(checkpoint.state) if fits(name, checkpoint.state)]
    if not fitting:
        near = ", ".join(list(shortlist(checkpoint.state))[:4])
        hint = f" (perhaps of the kind of {near})" if near else ""
        raise UserError(f"cannot tell which timm model {checkpoint.path} is{hint}; pass --arch NAME")
    if len(fitting) > 1 and not _compute_alike(fitting[:4], checkpoint.state):
        raise UserError(
            f"{checkpoint.path} fits {', '.join(fitting[:4])} by names and shapes, yet they compute "
            "different features; pass --arch with the one it was trained as"
        )
    return fitting[0]


def shortlist(state: Mapping[str, Tensor]) -> Iterator[str]:
    """timm names that share the most telling keys with a state dict, plain names first."""
    import timm

    known = timm.list_models()
    patterns = [pattern for anchor, names in SHORTLISTS.items() if anchor in state for pattern in names]
    if TRANSFORMER in state and "patch_embed.proj.weight" in state:
        width, _, patch = state["patch_embed.proj.weight"].shape[:3]
        size = VIT_SIZES.get(width, "*")
        patterns += [
            f"vit_{size}_patch{patch}_*",
            f"deit_{size}_patch{patch}_*",
            f"deit3_{size}_patch{patch}_*",
        ]
    found = {name for pattern in patterns for name in fnmatch.filter(known, pattern)}
    yield from sorted(found, key=lambda name: (len(name), name))


def load_timm(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """A backbone from timm weights; input size, mean and std as the run or the model's settings have them."""
    name = wanted.arch or stated_arch(checkpoint) or identify(checkpoint)
    spec = timm_spec(name, checkpoint.state)
    network, feature_dim = build(spec)
    matched = load_weights(network, checkpoint.state, str(checkpoint.path), wanted.partial)
    mean, std, size = timm_input(name)
    said = _stated_input(checkpoint)
    size = spec["kwargs"].get("img_size") or said.get("input_size", size)
    why = {key: "stated by the run" if key in said else "timm's settings of this model" for key in INPUT_FACTS}
    backbone = Backbone(network, feature_dim, said.get("mean", mean), said.get("std", std), size, spec)
    epoch = payload_fields(checkpoint.payload).get("epoch")
    origin = Origin("timm", describe(spec), epoch if isinstance(epoch, int) else None, why)
    return Loaded(backbone, origin, matched=matched)


def published(path: str) -> Loaded:
    """A timm model with the weights that timm publishes for it (``timm:NAME``), downloaded or cached."""
    import timm

    name = path.removeprefix("timm:")
    base = name.split(".")[0]
    if not timm.is_model(base):
        build({"family": "timm", "name": base})  # raises with the nearest names
    if not timm.is_model_pretrained(name):
        raise UserError(f"timm has no pretrained weights for {name!r}; timm.list_pretrained() lists what there is")
    offline = UserError(
        f"could not fetch timm's weights for {name!r}; with no network, download the file elsewhere and "
        f"give its path with --arch {base}"
    )
    if not _reachable(name):
        raise offline
    try:
        network: Any = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # the hub's client raises its own errors, which vary with its version
        raise offline from error
    config = network.pretrained_cfg
    size = int(config["input_size"][-1])
    spec = {"family": "timm", "name": base, "kwargs": {}}
    backbone = Backbone(network, timm_features(network), config["mean"], config["std"], size, spec)
    why = dict.fromkeys(INPUT_FACTS, "published with the weights")
    return Loaded(backbone, Origin(f"timm, published weights of {name}", describe(spec), why=why), format="timm")


def _reachable(name: str) -> bool:
    """Whether weights are cached or the hub's host has an address; its client would retry for a minute."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(name)
    hub_id = getattr(config, "hf_hub_id", None)
    if not hub_id or any(variable.lower() == "https_proxy" for variable in os.environ):
        return True
    files = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors")
    if any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in files):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _stated_input(checkpoint: Checkpoint) -> dict[str, Any]:
    """Input size, mean and std where a training run's arguments or a hub config state them."""
    payload = payload_fields(checkpoint.payload)
    config = payload_fields(checkpoint.sidecar.get("config.json"))
    sources = (
        payload_fields(payload.get("args")),
        payload_fields(checkpoint.sidecar.get("args.yaml")),
        payload_fields(config.get("pretrained_cfg")),
    )
    said: dict[str, Any] = {}
    for source in sources:
        size = source.get("img_size") or (source.get("input_size") or [None])[-1]
        candidates = {"input_size": size, "mean": source.get("mean"), "std": source.get("std")}
        said = {key: value for key, value in candidates.items() if value} | said
    return said


def _names_in(stem: str) -> list[str]:
    """timm names that occur in a file name as whole words, longest first."""
    import timm

    words = [name for name in timm.list_models() if name in stem]
    whole = [name for name in words if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", stem)]
    return sorted(whole, key=len, reverse=True)


def _compute_alike(names: list[str], state: Mapping[str, Tensor]) -> bool:
    """Whether models with the same weights give the same features; padding or epsilon may differ silently."""
    outputs = []
    for name in names:
        spec = timm_spec(name, state)
        network, _ = build(spec)
        load_strictly(network, state, name)
        size = spec["kwargs"].get("img_size") or timm_input(name)[2]
        image = torch.linspace(-2, 2, 3 * size * size).sin().view(1, 3, size, size)
        with torch.no_grad():
            outputs.append(network.eval()(image))
    first = outputs[0]
    return all(o.shape == first.shape and torch.allclose(o, first, rtol=1e-3, atol=1e-4) for o in outputs)


def _matches(checkpoint: Checkpoint) -> bool:
    if stated_arch(checkpoint) is not None:
        return True
    anchors = (*SHORTLISTS, TRANSFORMER)
    if is_resnet(checkpoint.state) or "encoder.pos_embedding" in checkpoint.state:
        return False
    return any(anchor in checkpoint.state for anchor in anchors) or bool(_names_in(checkpoint.path.stem))


formats.register("timm")(CheckpointFormat("timm", _matches, load_timm, rank=40, knows=knows))

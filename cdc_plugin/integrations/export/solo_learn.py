"""Export a backbone as a run folder of solo-learn: a ``.ckpt`` for its linear evaluation and its ``args.json``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD, is_resnet, resnet_spec
from cdc_plugin.checkpoints.load import Wanted, formats
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import CheckpointError, UserError, option
from cdc_plugin.integrations.export import base
from cdc_plugin.integrations.export.base import Export, Source
from cdc_plugin.integrations.export.torchvision import find_torchvision_name

# solo-learn's networks by the width of their first layer and the number of blocks in one of their stages.
CONVNEXTS = {(96, 9): "tiny", (96, 27): "small", (128, 27): "base", (192, 27): "large"}
SWINS = {(96, 6): "tiny", (96, 18): "small", (128, 18): "base", (192, 18): "large"}
POOLFORMERS = {(64, 2): "s12", (64, 4): "s24", (64, 6): "s36", (96, 6): "m36", (96, 8): "m48"}
VITS = {192: "tiny", 384: "small", 768: "base", 1024: "large"}
# What its evaluation normalises with: mean, std and side of the images.
CIFAR = ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261), 32)
CUSTOM = (IMAGENET_MEAN, IMAGENET_STD, 224)


@dataclass(frozen=True)
class Settings:
    """Settings from which solo-learn builds a network."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: str = "base"  # decides the class of a vision transformer; "base" is solo-learn's name for no method
    dataset: str = "custom"  # decides the stem of a ResNet


def export_solo_learn(source: Source, out: Path, overwrite: bool) -> Export:
    """Write a run folder that ``main_linear.py`` loads without a missing or unexpected weight."""
    base.check_folder(out, overwrite)
    settings, spec = _find_settings(source)
    folder = base.create_folder(out)
    checkpoint = folder / f"cdc-{settings.name}-ep={source.epochs or 0}.ckpt"
    payload = build_payload(source)
    write_atomically(checkpoint, lambda path: torch.save(payload, path))
    arguments = base.write_json(folder / "args.json", build_arguments(source, settings))
    kwargs = "".join(f" ++backbone.kwargs.{key}={value}" for key, value in settings.kwargs.items())
    # Hydra removes the quotes; without them the equals sign in the file name would be an error.
    load = (
        f"python main_linear.py --config-path FOLDER --config-name FILE.yaml backbone.name={settings.name}{kwargs} "
        f"pretrain_method={settings.method} data.dataset={settings.dataset} "
        f"'pretrained_feature_extractor=\"{checkpoint}\"'",
    )
    made = {"library": "solo-learn", "network": settings.name, "load": load}
    described = base.write_description(checkpoint, source, spec, made)
    base.remove_earlier(folder, ".ckpt", keep=checkpoint)
    notes = (*_note_input(source, settings), *source.note_assumptions())
    return Export((checkpoint, arguments, described), settings.name, load, notes)


def build_payload(source: Source) -> dict[str, Any]:
    """Return the content of a ``.ckpt``: what Lightning would save if only the backbone had been trained."""
    version = {"pytorch-lightning_version": "2.1.2"}  # the one that solo-learn pins
    weights = {f"backbone.{key}": value for key, value in source.weights().items()}
    untouched: dict[str, Any] = {"loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    return {"epoch": source.epochs or 0, "global_step": 0, **version, "state_dict": weights, **untouched}


def build_arguments(source: Source, settings: Settings) -> dict[str, Any]:
    """Return the content of ``args.json``: what solo-learn needs to build the model, and others to feed it."""
    facts = source.input_facts()
    view = {"crop_size": facts["input_size"], "num_crops": 1, "mean": facts["mean"], "std": facts["std"]}
    classes = int(getattr(source.head, "clusters", 1))
    crops = {"num_large_crops": 1, "num_small_crops": 0}
    return {
        "name": f"cdc-{settings.name}",
        "method": settings.method,
        "backbone": {"name": settings.name, "kwargs": settings.kwargs},
        "method_kwargs": {},
        "data": {"dataset": settings.dataset, "num_classes": classes, **crops},
        "augmentations": [view],
        "optimizer": {"name": "sgd", "batch_size": 256, "lr": 0.1, "classifier_lr": 0.1, "weight_decay": 0.0},
        "scheduler": {"name": "none"},
        "max_epochs": max(source.epochs or 0, 1),
    }


def guess_settings(state: Mapping[str, Tensor], side: int) -> Iterator[Settings]:
    """Yield settings whose network may have these weights, by their names and shapes."""
    if is_resnet(state):
        spec = resnet_spec(state)[0]
        name = find_torchvision_name(spec)
        if name in ("resnet18", "resnet50"):
            yield Settings(name, dataset="cifar10" if spec["stem"]["kernel"] == 3 else "custom")
    elif "block1.layer.0.conv1.weight" in state:
        yield Settings(f"wide_resnet28w{len(state['block1.layer.0.conv1.weight']) // 16}")
    elif "stages.0.blocks.0.conv_dw.weight" in state:
        yield from _guess_size("convnext", CONVNEXTS, state, "stem.0.weight", "stages.2.blocks.")
    elif "network.0.0.norm1.weight" in state:
        yield from _guess_size("poolformer", POOLFORMERS, state, "patch_embed.proj.weight", "network.0.")
    elif (table := state.get("layers.0.blocks.0.attn.relative_position_bias_table")) is not None:
        kwargs = _drop_defaults({"window_size": ((math.isqrt(len(table)) + 1) // 2, 7), "img_size": (side, 224)})
        yield from _guess_size("swin", SWINS, state, "patch_embed.proj.weight", "layers.2.blocks.", **kwargs)
    elif "blocks.0.attn.qkv.weight" in state and "patch_embed.proj.weight" in state:
        width, _, patch = state["patch_embed.proj.weight"].shape[:3]
        kwargs = _drop_defaults({"patch_size": (patch, 16), "img_size": (side, 224)})
        if "fc_norm.weight" in state:
            kwargs["global_pool"] = "avg"
        if width in VITS:
            yield from (Settings(f"vit_{VITS[width]}", kwargs, method) for method in ("base", "mae", "mocov3"))


def _find_settings(source: Source) -> tuple[Settings, dict[str, Any]]:
    """Return settings under which solo-learn's network computes the source's features, and our spec of it."""
    payload = build_payload(source)
    tried = list(guess_settings(source.weights(), source.backbone.input_size))
    for settings in tried:
        beside = {"args.json": build_arguments(source, settings)}
        checkpoint = Checkpoint(Path(source.name) / "export.ckpt", payload, beside, payload["state_dict"])
        try:
            built = formats.get("solo-learn").load(checkpoint, Wanted()).backbone
        except UserError:
            continue  # other names or shapes
        if built.spec is not None and base.compute_same_features(source.backbone, built.module):
            return settings, built.spec
    if tried and tried[0].dataset == "cifar10":
        raise CheckpointError(
            f"solo-learn's {tried[0].name} for small images has a 3x3 stem with padding 2 and no max-pool, "
            f"{source.name} is {source.network}: it would load there and compute other features; "
            f"{option('to', 'torchvision')} takes it"
        )
    raise source.refuse("solo-learn")


def _guess_size(
    kind: str, names: Mapping[Any, str], state: Mapping[str, Tensor], first: str, stage: str, **kwargs: Any
) -> Iterator[Settings]:
    blocks = {key.removeprefix(stage).split(".")[0] for key in state if key.startswith(stage)}
    size = names.get((len(state[first]), len(blocks))) if first in state else None
    if size is not None:
        yield Settings(f"{kind}_{size}", kwargs)


def _drop_defaults(values: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the values that differ from solo-learn's defaults, given {name: (value, default)}."""
    return {name: int(value) for name, (value, default) in values.items() if value != default}


def _note_input(source: Source, settings: Settings) -> tuple[str, ...]:
    """Warn where the mean, std and image size that its evaluation fixes per data set are not the backbone's."""
    mean, std, side = CIFAR if settings.dataset == "cifar10" else CUSTOM
    facts = source.input_facts()
    distance = max(abs(a - b) for a, b in zip((*mean, *std), (*facts["mean"], *facts["std"]), strict=True))
    if distance < 0.01 and facts["input_size"] == side:
        return ()
    return (
        f"solo-learn evaluates {settings.dataset} data with mean {list(mean)}, std {list(std)} at {side} pixels, "
        f"this backbone needs mean {facts['mean']}, std {facts['std']} at {facts['input_size']}: set them in "
        "solo/data/classification_dataloader.py",
    )

"""Export a backbone for timm: ``model.safetensors`` and ``config.json``, as on the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdc_plugin.checkpoints.formats.torchvision import is_resnet, resnet_spec
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.views import storage_size
from cdc_plugin.errors import option
from cdc_plugin.integrations.export import base
from cdc_plugin.integrations.export.base import Export, Source
from cdc_plugin.integrations.export.torchvision import find_torchvision_name
from cdc_plugin.models.architectures import build

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# What timm needs, beside facts about the input, to replace the classifier or the input channels.
KEPT = ("pool_size", "first_conv", "classifier", "fixed_input_size", "min_input_size")


def export_timm(source: Source, out: Path, overwrite: bool) -> Export:
    """Write a folder for ``timm.create_model("local-dir:FOLDER", pretrained=True)``."""
    from safetensors.torch import save_file

    base.check_folder(out, overwrite)
    spec = base.find_equal_network(source, _candidates(source))
    if spec is None:
        others = f"{option('to', 'torchvision')} takes ResNets with any stem, {option('to', 'onnx')} any network"
        raise source.refuse("timm", others)
    folder = base.create_folder(out)
    weights = folder / WEIGHTS
    load = ("import timm", f'model = timm.create_model("local-dir:{folder}", pretrained=True)')
    tensors = source.weights()
    write_atomically(weights, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config = base.write_json(folder / CONFIG, build_config(source, spec))
    made = {"library": "timm", "network": spec["name"], "load": load}
    described = base.write_description(weights, source, spec, made)
    return Export((weights, config, described), spec["name"], load, source.note_assumptions())


def build_config(source: Source, spec: dict[str, Any]) -> dict[str, Any]:
    """Return what timm reads beside the weights: how to build the model, and what its input looks like."""
    network: Any = build(spec)[0]
    facts = source.input_facts()
    side, size = facts["input_size"], source.backbone.input_size
    images = {"input_size": [3, side, side], "mean": facts["mean"], "std": facts["std"]}
    # Of plain views.
    crop = {"crop_pct": size / storage_size(size), "interpolation": getattr(size, "resample", "bilinear")}
    crop |= {"crop_mode": "squash" if getattr(size, "squeezed", False) else "center"}
    kept = {key: network.pretrained_cfg[key] for key in KEPT if network.pretrained_cfg.get(key) is not None}
    return {
        "architecture": spec["name"],
        "num_classes": 0,
        "num_features": source.backbone.feature_dim,
        "model_args": {**spec.get("kwargs", {}), "num_classes": 0},
        "pretrained_cfg": {"tag": "cdc", "custom_load": False, **images, "num_classes": 0, **crop, **kept},
    }


def _candidates(source: Source) -> Iterator[dict[str, Any]]:
    spec = source.backbone.spec or {}
    if spec.get("family") == "timm":
        yield {"family": "timm", "name": spec["name"], "kwargs": dict(spec.get("kwargs", {}))}
    elif is_resnet(state := source.backbone.module.state_dict()):
        name = find_torchvision_name(resnet_spec(state)[0])  # timm has the same names for these
        if name is not None:
            yield {"family": "timm", "name": name, "kwargs": {}}

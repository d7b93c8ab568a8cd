"""Export a backbone as a state dict for ``torchvision.models``, also with the small stems of low-resolution images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.checkpoints.formats.torchvision import is_resnet, resnet_spec
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.integrations.export import base
from cdc_plugin.integrations.export.base import Export, Source
from cdc_plugin.models.architectures import STEM

# torchvision's ResNets by block, depths, groups and width per group; all have the widths 64/128/256/512.
RESNETS = {
    ("basic", 2, 2, 2, 2, 1, 64): "resnet18",
    ("basic", 3, 4, 6, 3, 1, 64): "resnet34",
    ("bottleneck", 3, 4, 6, 3, 1, 64): "resnet50",
    ("bottleneck", 3, 4, 23, 3, 1, 64): "resnet101",
    ("bottleneck", 3, 8, 36, 3, 1, 64): "resnet152",
    ("bottleneck", 3, 4, 6, 3, 32, 4): "resnext50_32x4d",
    ("bottleneck", 3, 4, 23, 3, 32, 8): "resnext101_32x8d",
    ("bottleneck", 3, 4, 23, 3, 64, 4): "resnext101_64x4d",
    ("bottleneck", 3, 4, 6, 3, 1, 128): "wide_resnet50_2",
    ("bottleneck", 3, 4, 23, 3, 1, 128): "wide_resnet101_2",
}


def export_torchvision(source: Source, out: Path, overwrite: bool) -> Export:
    """Write a state dict without classifier, and beside it the lines of Python that load it."""
    base.check_file(out, (".pth", ".pt"), "resnet18.pth", overwrite, described=True)
    spec = base.find_equal_network(source, _candidates(source))
    name = None if spec is None else find_torchvision_name(spec)
    if spec is None or name is None:
        raise source.refuse("torchvision")
    load = write_loading_code(name, spec, out)
    tensors = source.weights()
    write_atomically(out, lambda path: torch.save(tensors, path))
    described = base.write_description(out, source, spec, {"library": "torchvision", "network": name, "load": load})
    unusual = spec["family"] == "resnet" and STEM | dict(spec.get("stem", {})) != STEM
    note = "its stem is not torchvision's own: build conv1 and maxpool as shown, or the features differ"
    return Export((out, described), name, load, (*([note] if unusual else []), *source.note_assumptions()))


def find_torchvision_name(spec: dict[str, Any]) -> str | None:
    """Return torchvision's name for the network of a spec, apart from its stem; None if it has none."""
    if spec["family"] == "torchvision":
        return str(spec["name"])
    if list(spec["widths"]) != [64, 128, 256, 512] or spec.get("stem", {}).get("width", 64) != 64:
        return None
    shape = (spec["block"], *spec["depths"], spec.get("groups", 1), spec.get("width_per_group", 64))
    return RESNETS.get(shape)


def write_loading_code(name: str, spec: dict[str, Any], file: Path) -> tuple[str, ...]:
    """Return the lines of Python that build torchvision's network, adapt it, and load the weights strictly."""
    kwargs = dict(spec.get("kwargs", {}))
    if name in ("googlenet", "inception_v3"):  # they have auxiliary classifiers, which features do not need
        kwargs = {"init_weights": False, "aux_logits": False, **kwargs}
    words = "".join(f", {key}={value!r}" for key, value in kwargs.items())
    lines = ["import torch, torchvision", f'model = torchvision.models.get_model("{name}"{words})']
    if spec["family"] == "resnet":
        stem = STEM | dict(spec.get("stem", {}))
        sizes = f"{stem['kernel']}, stride={stem['stride']}, padding={stem['padding']}"
        if sizes != "7, stride=2, padding=3":
            lines.append(f"model.conv1 = torch.nn.Conv2d(3, 64, {sizes}, bias=False)")
        if not stem["pool"]:
            lines.append("model.maxpool = torch.nn.Identity()")
        classifier = "fc"
    else:
        from torchvision import models

        with torch.device("meta"):
            network = models.get_model(name, weights=None, **kwargs)
        classifier = [path for path, layer in network.named_modules() if isinstance(layer, torch.nn.Linear)][-1]
    lines += [f"model.{classifier} = torch.nn.Identity()", f'model.load_state_dict(torch.load("{file}"))']
    return tuple(lines)


def _candidates(source: Source) -> Iterator[dict[str, Any]]:
    spec = source.backbone.spec
    if spec is not None and spec.get("family") in ("torchvision", "resnet"):
        yield spec
    elif is_resnet(source.backbone.module.state_dict()):
        yield resnet_spec(source.weights())[0]

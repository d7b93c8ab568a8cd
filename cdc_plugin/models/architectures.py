"""Networks from plain records: a spec fits in JSON, so that a result folder can rebuild its backbone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import UserError

Builder = Callable[[Mapping[str, Any]], tuple[nn.Module, int]]
# How a family builds the network of a spec; a format with networks of its own adds its family.
families: Registry[Builder] = Registry("network family")
STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}


def build(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """The network a spec describes, without a classifier and with random weights, and its number of features.

    Among others ``{"family": "resnet", "block": "basic" | "bottleneck", "depths", "widths", "stem",
    "groups", "width_per_group"}``, and ``{"family": "timm" | "torchvision", "name", "kwargs"}``.
    """
    family = spec.get("family")
    if family not in families:
        raise UserError(f"a backbone spec needs a family, one of {', '.join(families.names())}; found {family!r}")
    try:
        return families.get(str(family))(spec)
    except KeyError as error:
        raise UserError(f"a backbone spec of family {family!r} needs {error.args[0]!r}: {dict(spec)}") from error


def describe(spec: Mapping[str, Any] | None) -> str:
    """A spec in words."""
    if spec is None:
        return "a network of the user's own class"
    if spec["family"] != "resnet":
        extra = ", ".join(f"{key}={value}" for key, value in (spec.get("kwargs") or {}).items())
        return f"{spec['family']} {spec.get('name', '')}".strip() + (f" ({extra})" if extra else "")
    stem = STEM | dict(spec.get("stem", {}))
    named = {("basic", 2, 2, 2, 2): "ResNet-18", ("basic", 3, 4, 6, 3): "ResNet-34"}
    named |= {("bottleneck", 3, 4, 6, 3): "ResNet-50", ("bottleneck", 3, 4, 23, 3): "ResNet-101"}
    name = named.get((spec["block"], *spec["depths"]), f"ResNet of {spec['depths']} {spec['block']} blocks")
    return (
        f"{name}, widths {'/'.join(map(str, spec['widths']))}, stem {stem['kernel']}x{stem['kernel']} stride "
        f"{stem['stride']} padding {stem['padding']}, {'max-pool' if stem['pool'] else 'no max-pool'}"
        + ("" if stem.get("relu", True) else ", no ReLU")
    )


@families.register("resnet")
def build_resnet(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """A ResNet with torchvision's parameter names, of any widths and stem."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    depths, widths = list(spec["depths"]), list(spec["widths"])
    if len(depths) != 4 or len(widths) != 4 or min(depths + widths) < 1:
        raise UserError(f"a resnet spec takes 4 depths and 4 widths above 0; found {depths} and {widths}")
    blocks: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
    if spec["block"] not in blocks:
        raise UserError(f"a resnet block is 'basic' or 'bottleneck'; found {spec['block']!r}")
    block = blocks[spec["block"]]
    stem = STEM | dict(spec.get("stem", {}))
    unknown = sorted(set(stem) - {*STEM, "width", "pool_kernel", "relu"})
    if unknown:
        known = ", ".join([*STEM, "pool_kernel", "relu"])
        raise UserError(f"a resnet stem takes {known} and width; found {', '.join(unknown)} too")
    stem_width = int(stem.get("width", widths[0]))

    class ShapedResNet(ResNet):
        """torchvision fixes the four widths in its constructor; here each stage takes its own."""

        def _make_layer(self, block: Any, planes: int, blocks: int, *args: Any, **kwargs: Any) -> nn.Sequential:
            stage = {64: 0, 128: 1, 256: 2, 512: 3}[planes]
            if stage == 0:
                self.inplanes = stem_width
            return super()._make_layer(block, widths[stage], blocks, *args, **kwargs)

    network = ShapedResNet(
        block,
        depths,
        num_classes=1,
        groups=int(spec.get("groups", 1)),
        width_per_group=int(spec.get("width_per_group", 64)),
    )
    network.conv1 = nn.Conv2d(3, stem_width, stem["kernel"], stem["stride"], stem["padding"], bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.bn1 = nn.BatchNorm2d(stem_width)
    network.maxpool = nn.MaxPool2d(int(stem.get("pool_kernel", 3)), 2, 1) if stem["pool"] else nn.Identity()
    if not stem.get("relu", True):  # lost where layers were put in a list and their ReLU was a function call
        network.relu = nn.Identity()
    network.fc = nn.Identity()
    return network, widths[3] * block.expansion


@families.register("timm")
def build_timm(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """A timm model by name, its classifier left out."""
    import timm

    name, kwargs = spec["name"], dict(spec.get("kwargs", {}))
    if not timm.is_model(name):
        raise UserError(f"timm has no model {name!r}{_near_timm(name)}; timm.list_models() lists them all")
    try:
        network = timm.create_model(name, pretrained=False, num_classes=0, **kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"timm could not build {name!r} with {kwargs}: {_first_line(error)}") from error
    # Networks with a convolutional head, as mobilenetv3, give head_hidden_size numbers, not num_features.
    return network, timm_features(network)


@families.register("torchvision")
def build_torchvision(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """A torchvision classifier by name; its last linear layer gives way to the identity."""
    from torchvision import models

    name = spec["name"]
    if name not in models.list_models(module=models):
        near = difflib.get_close_matches(name, models.list_models(module=models), n=3)
        hint = f"; close: {', '.join(near)}" if near else ""
        raise UserError(f"torchvision has no image classifier {name!r}{hint}")
    # GoogLeNet and Inception would initialise for minutes and add auxiliary classifiers otherwise.
    extra = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    kwargs = spec.get("kwargs", {})
    try:
        network = models.get_model(name, weights=None, **extra, **kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"torchvision could not build {name!r} with {kwargs}: {_first_line(error)}") from error
    return network, _drop_classifier(network, name)


def skeleton(spec: Mapping[str, Any]) -> nn.Module:
    """The network without memory for its weights, for comparing names and shapes."""
    try:
        with torch.device("meta"):
            return build(spec)[0]
    except NotImplementedError:  # a constructor that computes with tensors, as torchvision's RegNet
        return build(spec)[0]


def timm_features(network: Any) -> int:
    """How many features a timm network without classifier gives."""
    return int(getattr(network, "head_hidden_size", None) or network.num_features)


def image_size_default(spec: Mapping[str, Any]) -> int:
    """The side of the images that a network of this spec is usually given."""
    if spec["family"] == "resnet":
        return 32 if spec.get("stem", STEM).get("kernel", 7) < 7 else 224
    return 224


def timm_input(name: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Mean, std and image side that timm documents for a model."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224
    return tuple(config.mean), tuple(config.std), int(config.input_size[-1])


def _drop_classifier(network: nn.Module, name: str) -> int:
    linears = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    path, layer = linears[-1] if linears else ("", nn.Linear(1, 1))
    if not path.startswith(("fc", "head", "classifier")):
        raise UserError(f"torchvision's {name!r} has no linear classifier to take off; use its timm twin")
    parent_path, _, leaf = path.rpartition(".")
    setattr(network.get_submodule(parent_path), leaf, nn.Identity())
    return layer.in_features


def _near_timm(name: str) -> str:
    import timm

    near = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f" (close: {', '.join(near)})" if near else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

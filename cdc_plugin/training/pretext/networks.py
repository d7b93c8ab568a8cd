"""The networks that ``--arch`` names: ResNets with a stem that suits the image size, or any of timm's."""

from __future__ import annotations

from typing import Any

from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

SMALL_INPUT = 64  # up to here a 7x7 stem with stride and pool would throw most of the image away
WIDTHS = [64, 128, 256, 512]
RESNETS: dict[str, dict[str, Any]] = {
    "small": {"block": "basic", "depths": [2, 2, 2, 2], "widths": [16, 32, 64, 128]},
    "resnet18": {"block": "basic", "depths": [2, 2, 2, 2], "widths": WIDTHS},
    "resnet34": {"block": "basic", "depths": [3, 4, 6, 3], "widths": WIDTHS},
    "resnet50": {"block": "bottleneck", "depths": [3, 4, 6, 3], "widths": WIDTHS},
}
LARGE_STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
SMALL_STEM = {"kernel": 3, "stride": 1, "padding": 2, "pool": False}  # the paper's, padding included
FAST_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": True}  # the demo's: a quarter of the work


def spec_of(arch: str, input_size: int) -> dict[str, Any]:
    """Return the spec of a named network for images of this size; see ``checkpoints.architectures``."""
    if arch in RESNETS:
        small_stem = FAST_STEM if arch == "small" else SMALL_STEM
        stem = small_stem if input_size <= SMALL_INPUT else LARGE_STEM
        return {"family": "resnet", **RESNETS[arch], "stem": dict(stem)}
    import timm

    name = arch.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(f"unknown --arch {arch!r}; it is one of {', '.join(RESNETS)}, or the name of a timm model")
    config = timm.get_pretrained_cfg(name)
    # Transformers are built for one image size; convolutional networks take any.
    kwargs = {"img_size": input_size} if config is not None and config.fixed_input_size else {}
    return {"family": "timm", "name": name, "kwargs": kwargs}


def fresh_backbone(arch: str, input_size: int, mean: list[float], std: list[float]) -> Backbone:
    """Return a network with random weights."""
    spec = spec_of(arch, input_size)
    module, feature_dim = build(spec)
    return Backbone(module, feature_dim, mean, std, input_size, spec)

"""Fit weights to timm models: settings that the weights reveal, older names, and models with equal shapes."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats._vit import TRANSFORMER
from cdc_plugin.checkpoints.formats.timm.index import PATCHES
from cdc_plugin.checkpoints.weights import compare, load_strictly
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build, skeleton, timm_input

# Numbers of a module that its name or its training need, not its features.
IRRELEVANT = ("num_classes", "drop", "training", "dump_patches", "grad_checkpointing", "img_size", "init_values")


def timm_spec(name: str, state: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the spec of a named model with the settings of the run and those that weights reveal."""
    spec: dict[str, Any] = {"family": "timm", "name": name.split(".")[0], "kwargs": dict(settings or {})}
    patches, kwargs = state.get(PATCHES), spec["kwargs"]
    if patches is None or patches.ndim != 4 or TRANSFORMER not in state:
        return spec
    usual = _skeleton(spec).state_dict()
    if PATCHES in usual and usual[PATCHES].shape[-1] != patches.shape[-1]:
        kwargs["patch_size"] = patches.shape[-1]
    registers, usual_registers = state.get("reg_token", state.get("register_tokens")), usual.get("reg_token")
    if registers is not None and registers.ndim == 3 and getattr(usual_registers, "shape", None) != registers.shape:
        kwargs["reg_tokens"] = registers.shape[1]
    for norm, other, pool in (("fc_norm", "norm", "avg"), ("norm", "fc_norm", "token")):
        if f"{norm}.weight" in state and f"{other}.weight" not in state and f"{norm}.weight" not in usual:
            kwargs["global_pool"] = pool
    if kwargs != (settings or {}):
        usual = _skeleton(spec).state_dict()
    stored, expected = state.get("pos_embed"), usual.get("pos_embed")
    if stored is None or stored.ndim != 3 or expected is None or expected.shape == stored.shape:
        return spec
    prefix = expected.shape[1] - math.isqrt(expected.shape[1]) ** 2  # class and register tokens beside the square grid
    grid = math.isqrt(max(stored.shape[1] - prefix, 0))
    kwargs["img_size"] = grid * patches.shape[-1]
    return spec


def settings_changed(name: str, state: Mapping[str, Tensor]) -> int:
    """Return how many settings, apart from the image size, differ from the model's own."""
    try:
        return len(timm_spec(name, state)["kwargs"].keys() - {"img_size"})
    except UserError:  # no such model can be built
        return sys.maxsize


def fit(
    name: str, state: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Mapping[str, Tensor]] | None:
    """Return spec and weights under timm's present names, if they fit a model strictly; else None."""
    if "storage_tokens" in state:  # DINOv3 gives its class token; timm averages
        settings = {"global_pool": "token", **(settings or {})}
    try:
        spec = timm_spec(name, state, settings)
        if not compare(_skeleton(spec), state):
            return spec, state
        renamed = _renamed(spec, state)
        if renamed is None:
            return None
        spec = timm_spec(name, renamed, settings)
        return None if compare(_skeleton(spec), renamed) else (spec, renamed)
    except UserError:
        return None


def fit_or_guess(
    name: str, state: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return `fit`, or a spec whose load will say what does not fit."""
    return fit(name, state, settings) or (timm_spec(name, state, settings), state)


def _renamed(spec: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights under timm's present names, by timm's own function for older names and authors' releases."""
    import timm

    module = sys.modules[timm.model_entrypoint(spec["name"]).__module__]
    rename = getattr(module, "checkpoint_filter_fn", None)
    if rename is None:
        return None
    # timm recognises DINOv2's release by its mask token, which may have been dropped before.
    weights = dict(state) | ({"mask_token": torch.zeros(1)} if "register_tokens" in state else {})
    # It adds the two up, which half precision would round.
    added = [key for key in ("cls_token", "pos_embed") if key in state and state[key].is_floating_point()]
    weights |= {key: state[key].float() for key in added}
    try:
        renamed = rename(weights, _skeleton(spec))
    except Exception:  # written for what their authors published, not for any file
        return None
    # It may resize weights to make them fit; those are no longer the weights of the file.
    dropped_tokens = {"pos_embed"} if "register_tokens" in state else set()
    resized = [
        k for k, v in renamed.items() if k in state and k not in dropped_tokens and v.numel() != state[k].numel()
    ]
    return None if resized else renamed


def find_distinct(names: Sequence[str], state: Mapping[str, Tensor]) -> list[str]:
    """Return one name for each way to compute features from the same weights."""
    by_construction: dict[Any, str] = {}
    for name in names:
        spec, _ = fit_or_guess(name, state)
        by_construction.setdefault(_construction(_skeleton(spec)), name)
    kinds = list(by_construction.values())
    if len(kinds) == 1:
        return kinds
    outputs: dict[str, Tensor] = {}
    for name in kinds:
        output = _trial(name, state)
        same_shape = [other for other in outputs.values() if other.shape == output.shape]
        if not any(torch.allclose(output, other, rtol=1e-3, atol=1e-4) for other in same_shape):
            outputs[name] = output
    return list(outputs)


def _construction(network: nn.Module) -> tuple[Any, ...]:
    """Return all settings of a network's modules; networks that agree in them compute the same from equal weights."""
    return tuple(
        (path, type(module).__name__, tuple(sorted((k, str(v)) for k, v in vars(module).items() if _counts(k, v))))
        for path, module in network.named_modules()
    )


def _counts(name: str, value: Any) -> bool:
    named = not name.startswith("_") and not any(word in name for word in IRRELEVANT)
    return named and isinstance(value, (bool, int, float, str, tuple))


def _trial(name: str, state: Mapping[str, Tensor]) -> Tensor:
    spec, weights = fit_or_guess(name, state)
    network, _ = build(spec)
    load_strictly(network, weights, name)
    size = spec["kwargs"].get("img_size") or timm_input(name.split(".")[0])[2]
    image = torch.linspace(-2, 2, 3 * size * size).sin().view(1, 3, size, size)
    with torch.no_grad():
        features: Tensor = network.eval()(image)
    return features


def _skeleton(spec: Mapping[str, Any]) -> nn.Module:
    return _cached_skeleton(json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=64)
def _cached_skeleton(spec: str) -> nn.Module:
    return skeleton(json.loads(spec))

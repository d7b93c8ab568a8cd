"""Load weights into a network completely or not at all: every name and shape must agree, or the error says which."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import build, skeleton
from cdc_plugin.models.backbone import Backbone

# A classifier that the features do not pass through; its weights may stay behind.
HEAD_PREFIXES = ("fc.", "head.", "heads.", "head_dist.", "classifier.")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Differences:
    """Names on which a network and a state dict disagree."""

    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)


class WeightsMismatchError(CheckpointError):
    """Weights do not fit: the message names a few, ``differences`` and ``shapes`` hold them all."""

    def __init__(self, message: str, differences: Differences, shapes: Mapping[str, tuple[Shape, Shape]]) -> None:
        super().__init__(message)
        self.differences = differences
        self.shapes = dict(shapes)  # misshapen weights: found, expected


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries below a prefix, without it.

    >>> strip_prefix({"backbone.fc.bias": 1, "head.bias": 2}, "backbone.")
    {'fc.bias': 1}
    """
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def compare(network: nn.Module, state: Mapping[str, Tensor]) -> Differences:
    """Return what a strict load would object to, except a dropped classifier and absent batch counters."""
    wanted = network.state_dict()
    shared = [key for key in wanted if key in state]
    misshapen = [key for key in shared if wanted[key].shape != state[key].shape or _mistyped(wanted[key], state[key])]
    missing = [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in wanted and not key.startswith(HEAD_PREFIXES)]
    return Differences(len(shared) - len(misshapen), tuple(missing), tuple(unexpected), tuple(misshapen))


def build_backbone(
    spec: dict[str, Any],
    state: Mapping[str, Tensor],
    source: str,
    mean: Sequence[float],
    std: Sequence[float],
    size: int,
    inferred: Sequence[str] = (),
    partial: bool = False,
) -> tuple[Backbone, float]:
    """Return the network of a spec with weights and input convention, and the share of its weights that matched.

    All must match unless ``partial`` is set; ``source`` names the file in messages.
    """
    # Compared without memory first: a damaged file may ask for a network of any size.
    empty = skeleton(spec)
    differences = compare(empty, state)
    if not differences.matched or (differences and not partial):
        raise _mismatch(differences, empty, state, source)
    try:
        network, feature_dim = build(spec)
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CheckpointError(f"the network of {source} cannot be built ({reason}); copy the file again") from error
    _copy_weights(network, {key: value for key, value in state.items() if key not in differences.misshapen})
    lost = len(differences.missing) + len(differences.misshapen)
    matched = differences.matched / (differences.matched + lost)
    return Backbone(network, feature_dim, mean, std, size, spec, inferred), matched


def load_strictly(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy the weights into the network, or raise with counts and the names nearest to those not found."""
    differences = compare(network, state)
    if differences:
        raise _mismatch(differences, network, state, source)
    _copy_weights(network, state)


def nearest(key: str, others: Sequence[str]) -> str | None:
    """Return the name most similar to a key, or None.

    >>> nearest("layer1.conv.weight", ["layer1.conv1.weight", "fc.bias"])
    'layer1.conv1.weight'
    """
    near = difflib.get_close_matches(key, others[:500], n=1)
    return near[0] if near else None


def _copy_weights(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    wanted = network.state_dict()
    given = type(wanted)((key, state[key].to(wanted[key].dtype)) for key in wanted if key in state)
    given._metadata = wanted._metadata  # type: ignore[attr-defined]  # the version of its names, which MNASNet asks for
    network.load_state_dict(given, strict=False)


def _mismatch(found: Differences, network: nn.Module, state: Mapping[str, Tensor], source: str) -> WeightsMismatchError:
    wanted = network.state_dict()
    parts = [
        f"{source} does not fit the network: {found.matched} of {len(wanted)} weights match, "
        f"{len(found.missing)} missing, {len(found.unexpected)} unexpected, {len(found.misshapen)} misshapen"
    ]
    if found.missing:
        parts.append("missing " + ", ".join(_with_nearest(k, found.unexpected) for k in found.missing[:5]))
    if found.unexpected:
        parts.append("unexpected " + ", ".join(_with_nearest(k, found.missing) for k in found.unexpected[:5]))
    if found.misshapen:
        shapes = [f"{k} {_form(state[k])} for {_form(wanted[k])}" for k in found.misshapen[:5]]
        parts.append("shapes " + ", ".join(shapes))
    message = "; ".join(parts) + f"; pass {option('arch', 'NAME')} of the network it was trained with"
    pairs = {key: (tuple(state[key].shape), tuple(wanted[key].shape)) for key in found.misshapen}
    return WeightsMismatchError(message, found, pairs)


def _mistyped(wanted: Tensor, found: Tensor) -> bool:
    """Return whether whole or complex numbers stand where floating-point weights, of any precision, belong."""
    return wanted.is_floating_point() and not found.is_floating_point()


def _form(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {tensor.dtype}".replace("torch.", "")
    return f"{tuple(tensor.shape)}{kind}"


def _with_nearest(key: str, others: tuple[str, ...]) -> str:
    near = nearest(key, others)
    return f"{key} (near: {near})" if near else key

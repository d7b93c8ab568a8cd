"""lightly-train: exported models, and the training checkpoints that hold a student, a teacher and whole modules."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from cdc_plugin.checkpoints.find_backbone import Inside, choose_inside, find_prefixes, without_wrappers
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.lightly import has_positions, load_inside, replace_input
from cdc_plugin.checkpoints.formats.timm import three_numbers
from cdc_plugin.checkpoints.formats.timm.fit import TRANSFORMER
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import build, describe
from cdc_plugin.models.backbone import Backbone

RECORD = "lightly_train"
WRAPPED = ".wrapped_model."
EXPORTS = ("exported_models/", "/exported_last.pt")
DEEPEST = 20


def load_lightly_train(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the model that lightly-train exports: the teacher where there is one, without projection heads."""
    payload = payload_fields(checkpoint.payload)
    record = payload_fields(payload.get(RECORD))
    inside = choose_inside(checkpoint, wanted) or _read_kept_module(checkpoint, record, wanted)
    if inside is None:
        raise CheckpointError(
            f"{checkpoint.path} is of lightly-train, but holds no network of torchvision or timm; "
            f"pass {option('arch', 'NAME')} with the one it was trained as"
        )
    loaded = _average_patches(load_inside(inside, wanted))
    normalised = payload_fields(record.get("normalize_args"))
    mean, std = (three_numbers(normalised.get(name)) for name in ("mean", "std"))
    stated = bool(mean and std)
    why = "stated by the run" if stated else "lightly-train's default, ImageNet's; an export does not state them"
    by_positions = has_positions(inside.checkpoint)
    inferred = (*(() if stated else ("mean", "std")), *(() if by_positions else ("input_size",)))
    pair: tuple[Any, Any] = (mean, std) if stated else (IMAGENET_MEAN, IMAGENET_STD)
    backbone = replace_input(loaded.backbone, *pair, size=None, inferred=inferred)
    facts = {"mean": why, "std": why, "branch": inside.why}
    facts["input_size"] = "inferred from its position embeddings" if by_positions else "usual for this network"
    version, epoch = record.get("version"), whole_number(payload.get("epoch"))
    writer = f"lightly-train {version}" if isinstance(version, str) else "lightly-train"
    trained = None if epoch is None else epoch + 1
    origin = Origin(writer, trained, {**loaded.origin.why, **facts}, loaded.origin.network)
    return replace(loaded, backbone=backbone, origin=origin)


def _average_patches(loaded: Loaded) -> Loaded:
    """Return a timm transformer that averages its patch tokens, as lightly-train does, instead of its class token."""
    backbone = loaded.backbone
    spec = backbone.spec or {}
    weights = backbone.module.state_dict()
    if spec.get("family") != "timm" or not {"cls_token", "norm.weight", TRANSFORMER} <= weights.keys():
        return loaded
    spec = {**spec, "kwargs": {**spec.get("kwargs", {}), "global_pool": "avg", "fc_norm": False}}
    network, features = build(spec)
    load_strictly(network, weights, "lightly-train's model")
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    averaged = Backbone(network, features, mean, std, backbone.input_size, spec, backbone.inferred)
    why = {**loaded.origin.why, "features": "mean of the patch tokens, as lightly-train embeds"}
    return replace(loaded, backbone=averaged, origin=replace(loaded.origin, why=why, network=describe(backbone.spec)))


def read_module_state(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the named weights of a pickled module that was read as inert records; none of its code runs."""
    if prefix.count(".") > DEEPEST:  # records may hold each other
        return {}
    fields = payload_fields(module)
    own = payload_fields(fields.get("_parameters")) | payload_fields(fields.get("_buffers"))
    state = {f"{prefix}{name}": value for name, value in own.items() if isinstance(value, Tensor)}
    for name, part in payload_fields(fields.get("_modules")).items():
        state |= read_module_state(part, f"{prefix}{name}.")
    return state


def _read_kept_module(checkpoint: Checkpoint, record: Mapping[str, Any], wanted: Wanted) -> Inside | None:
    """Return the user's model that the checkpoint keeps beside the weights; None if there is none."""
    state = read_module_state(payload_fields(record.get("models")).get("model"))
    if not state or wanted.branch == "online":
        return None
    return Inside(replace(checkpoint, state=state), {}, "the model that lightly-train exports")


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether lightly-train's record, its wrapped models or its name for exports are there."""
    if RECORD in payload_fields(checkpoint.payload) or any(WRAPPED in f".{key}" for key in checkpoint.state):
        return True
    named = any(mark in f"/{'/'.join(checkpoint.path.absolute().parts[-2:])}" for mark in EXPORTS)
    return named and bool(find_prefixes(without_wrappers(checkpoint.state)))

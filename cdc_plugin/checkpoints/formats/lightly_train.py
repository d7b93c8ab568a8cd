"""lightly-train: exported models, and the training checkpoints that hold a student, a teacher and whole modules."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.find_backbone import Inside, choose_inside, find_prefixes, without_wrappers
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.lightly import has_positions, load_inside, replace_input
from cdc_plugin.checkpoints.formats.timm import knows, three_numbers
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.safe_pickle.names import InertRecord
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import build, describe
from cdc_plugin.models.backbone import Backbone

RECORD = "lightly_train"
WRAPPED = ".wrapped_model."
EXPORTS = ("exported_models/", "/exported_last.pt")
# Weights of DINOv2's and DINOv3's own transformers, embedded by their class token, and of DINOv3's own ConvNeXt, whose
# norm comes before the mean.
MASK, DINO_CONVNEXT = "mask_token", "norms.3.weight"
DEEPEST = 20


def load_lightly_train(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the model that lightly-train exports: the one in its record, or the teacher where there is one."""
    payload = payload_fields(checkpoint.payload)
    record = payload_fields(payload.get(RECORD))
    kept = payload_fields(record.get("models")).get("model")
    # A distillation keeps the teacher it learns from beside the model, which may be another network.
    source = replace(checkpoint, state=(not wanted.branch and read_module_state(kept)) or checkpoint.state)
    inside, wanted = _choose_model(source, kept, wanted)
    loaded = load_inside(inside, wanted)
    if not (any(key.endswith(MASK) for key in source.state) and "cls_token" in inside.checkpoint.state):
        loaded = _average_map(loaded, DINO_CONVNEXT in inside.checkpoint.state)
    normalised = payload_fields(record.get("normalize_args"))
    mean, std = (three_numbers(normalised.get(name)) for name in ("mean", "std"))
    stated = bool(mean and std)
    why = "stated by the run" if stated else "lightly-train's default, ImageNet's; an export does not state them"
    by_positions = has_positions(inside.checkpoint)
    inferred = (*(() if stated else ("mean", "std")), *(() if by_positions else ("input_size",)))
    pair: tuple[Any, Any] = (mean, std) if stated else (IMAGENET_MEAN, IMAGENET_STD)
    if "tipsv2" in (loaded.backbone.spec or {}).get("name", ""):  # its images are in 0..1: ImageNet's pair is undone
        own = list(zip(*pair, IMAGENET_MEAN, IMAGENET_STD, strict=True))
        pair = [m - s * usual / spread for m, s, usual, spread in own], [s / spread for _, s, _, spread in own]
        why += ", less ImageNet's, which lightly-train undoes for TIPSv2"
    backbone = replace_input(loaded.backbone, *pair, size=None, inferred=inferred)
    facts = {"mean": why, "std": why, "branch": inside.why}
    facts["input_size"] = "inferred from its position embeddings" if by_positions else "usual for this network"
    version, epoch = record.get("version"), whole_number(payload.get("epoch"))
    writer = f"lightly-train {version}" if isinstance(version, str) else "lightly-train"
    trained = None if epoch is None else epoch + 1
    origin = Origin(writer, trained, {**loaded.origin.why, **facts}, loaded.origin.network)
    return replace(loaded, backbone=backbone, origin=origin)


def _choose_model(source: Checkpoint, kept: Any, wanted: Wanted) -> tuple[Inside, Wanted]:
    """Return the weights to take, and the name of timm's network that the model in the record has."""
    inside = choose_inside(source, wanted)
    if inside is None and wanted.arch is None:
        raise CheckpointError(
            f"{source.path} is of lightly-train, but holds no network of torchvision or timm"
            f"{f' ({kept.name})' if isinstance(kept, InertRecord) else ''}; "
            f"pass {option('arch', 'NAME')} if it was trained as one of theirs"
        )
    inside = inside or Inside(source, {}, "the model that lightly-train exports")
    name = payload_fields(payload_fields(kept).get("pretrained_cfg")).get("architecture")
    named = isinstance(name, str) and wanted.arch is None and knows(name)
    return inside, replace(wanted, arch=name) if named else wanted


def _average_map(loaded: Loaded, norm_first: bool) -> Loaded:
    """Return the network with the features that lightly-train trains: the mean of the last map, without a head."""
    backbone, spec = loaded.backbone, loaded.backbone.spec or {}
    weights, kwargs = dict(backbone.module.state_dict()), dict(spec.get("kwargs") or {})
    family, name = spec.get("family"), str(spec.get("name"))
    mapped = hasattr(backbone.module, "forward_intermediates") if family == "timm" else name.startswith("convnext")
    if family not in ("timm", "torchvision") or not mapped:
        return loaded
    if norm_first:
        kwargs["head_norm_first"] = True
        weights = {key.replace("head.norm.", "norm_pre."): value for key, value in weights.items()}
    if family == "timm":
        weights = {f"network.{key}": value for key, value in weights.items()}
    spec = {**spec, "family": f"{family}_map", "kwargs": kwargs}
    network, features = build(spec)
    load_strictly(network, {key: weights[key] for key in network.state_dict() if key in weights}, name)
    images = torch.linspace(-2, 2, 3 * backbone.input_size**2).sin().view(1, 3, backbone.input_size, -1)
    with torch.no_grad():
        plain, averaged = backbone.module.eval()(images), network.eval()(images)
    if plain.shape == averaged.shape and torch.allclose(plain, averaged, rtol=1e-4, atol=1e-5):
        return loaded
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    other = Backbone(network, features, mean, std, backbone.input_size, spec, backbone.inferred)
    why = {**loaded.origin.why, "features": "mean of its last feature map, as lightly-train embeds"}
    return replace(loaded, backbone=other, origin=replace(loaded.origin, why=why, network=describe(backbone.spec)))


def read_module_state(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the named weights of a pickled module that was read as inert records; none of its code runs."""
    if prefix.count(".") > DEEPEST:  # records may hold each other
        return {}
    fields = payload_fields(module)
    own = payload_fields(fields.get("_parameters")) | payload_fields(fields.get("_buffers"))
    left_out = fields.get("_non_persistent_buffers_set") or ()
    state = {f"{prefix}{k}": v for k, v in own.items() if isinstance(v, Tensor) and k not in left_out}
    for name, part in payload_fields(fields.get("_modules")).items():
        state |= read_module_state(part, f"{prefix}{name}.")
    return state


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether lightly-train's record, its wrapped models or its name for exports are there."""
    if RECORD in payload_fields(checkpoint.payload) or any(WRAPPED in f".{key}" for key in checkpoint.state):
        return True
    named = any(mark in f"/{'/'.join(checkpoint.path.absolute().parts[-2:])}" for mark in EXPORTS)
    return named and bool(find_prefixes(without_wrappers(checkpoint.state)))

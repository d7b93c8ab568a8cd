"""Backbones below a prefix: in Lightning modules of lightly's users, in files of MoCo, DINO, SwAV, BYOL and others."""

from dataclasses import replace
from typing import Any

from cdc_plugin.checkpoints.find_backbone import Inside, backbone_part, choose_inside, find_prefixes, without_wrappers
from cdc_plugin.checkpoints.formats._vit import TRANSFORMER, find_authors, fixes_input
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.resnet_keys import rename_resnet
from cdc_plugin.checkpoints.formats.timm import load_bare
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD, load_torchvision
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.backbone import Backbone

LIGHTNING = "pytorch-lightning_version"
# Where a backbone is searched if only the user names its network.
USUAL_PREFIXES = ("backbone.", "encoder.", "student_backbone.", "model.backbone.", "model.", "net.")
SIZE_NAMES = ("input_size", "image_size", "img_size", "crop_size")


def load_lightly(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone of a lightly user's model; lightly's transforms normalise with ImageNet's statistics."""
    return _load(checkpoint, wanted, "lightly", "lightly's default, ImageNet's; the file does not state them")


def load_generic(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the one backbone inside a model of unknown kind."""
    return _load(checkpoint, wanted, _guess_method(checkpoint), "ImageNet's, the file does not state them")


def load_inside(inside: Inside, wanted: Wanted) -> Loaded:
    """Return the network of the weights that were found inside a file, recognised by their names."""
    wanted = replace(wanted, branch=None)
    if inside.stem:
        return load_torchvision(inside.checkpoint, wanted, inside.stem)
    return load_bare(inside.checkpoint, wanted)


def replace_input(backbone: Backbone, mean: Any, std: Any, size: int | None, inferred: tuple[str, ...]) -> Backbone:
    """Return the same backbone with another input convention; open facts about its network stay open."""
    still_open = tuple(fact for fact in backbone.inferred if fact not in INPUT_FACTS)
    side = size or backbone.input_size
    return Backbone(backbone.module, backbone.feature_dim, mean, std, side, backbone.spec, (*inferred, *still_open))


def _load(checkpoint: Checkpoint, wanted: Wanted, writer: str, normalised: str) -> Loaded:
    inside = choose_inside(checkpoint, wanted) or _take_usual_prefix(checkpoint, wanted)
    loaded = load_inside(inside, wanted)
    payload = payload_fields(checkpoint.payload)
    stated = payload_fields(payload.get("hyper_parameters"))
    sizes = [whole_number(stated.get(name)) for name in SIZE_NAMES]
    size, why_size = next((size for size in sizes if size and size > 0), None), "stated in its hyper-parameters"
    fixed = (loaded.backbone.spec or {}).get("kwargs", loaded.backbone.spec or {})
    own_code = LIGHTNING not in payload and TRANSFORMER in inside.checkpoint.state
    authors = find_authors(inside.checkpoint) if own_code else ""
    inferred = [] if fixes_input(authors, loaded.backbone.input_size) else ["mean", "std"]
    if authors:
        writer = f"{authors}'s code or one like it"
        normalised = f"ImageNet's, {'the file does not state them' if inferred else f'as {authors} trains'}"
    if "img_size" in fixed or "image_size" in fixed or has_positions(inside.checkpoint):
        size, why_size = loaded.backbone.input_size, "inferred from its position embeddings"
    elif size is None:
        inferred.append("input_size")
        why_size = "usual for this network, the file does not state it"
    backbone = replace_input(loaded.backbone, IMAGENET_MEAN, IMAGENET_STD, size, tuple(inferred))
    facts = {"mean": normalised, "std": normalised, "input_size": why_size, "branch": inside.why}
    epoch = whole_number(payload.get("epoch"))
    if epoch is not None and LIGHTNING in payload:
        epoch += 1  # Lightning counts from 0
    origin = Origin(writer, epoch, {**loaded.origin.why, **facts})
    return replace(loaded, backbone=backbone, origin=origin)


def _take_usual_prefix(checkpoint: Checkpoint, wanted: Wanted) -> Inside:
    """Return the weights below the first usual prefix, for a network that only the user names."""
    state = without_wrappers(checkpoint.state)
    prefix = next((p for p in USUAL_PREFIXES if any(key.startswith(p) for key in state)), "")
    if wanted.arch is None:
        sample = ", ".join(list(state)[:3])
        raise CheckpointError(
            f"no known network is below {prefix or 'the top'} of {checkpoint.path} ({sample}); "
            f"pass {option('arch', 'NAME')} (a torchvision or timm name)"
        )
    named, stem = rename_resnet(backbone_part(state, prefix))
    return Inside(replace(checkpoint, state=named), stem, f"below {prefix or 'the top'}")


def has_positions(checkpoint: Checkpoint) -> bool:
    """Return whether the weights of a transformer show the size of its images."""
    return any(name in checkpoint.state for name in ("pos_embed", "encoder.pos_embedding"))


def _guess_method(checkpoint: Checkpoint) -> str:
    tops = {key.split(".")[0] for key in without_wrappers(checkpoint.state)}
    marks = {"encoder_q": "MoCo", "base_encoder": "MoCo v3", "prototypes": "SwAV", "decoder_embed": "MAE"}
    named = [method for mark, method in marks.items() if mark in tops]
    if {"student", "teacher"} <= set(payload_fields(checkpoint.payload)):
        named = ["DINO"]
    return f"{named[0]}'s code or one like it" if named else "a training script"


def _prefixes(checkpoint: Checkpoint) -> list[str]:
    """Return the prefixes of backbones; none if the file is nothing but a backbone under its usual names."""
    state = without_wrappers(checkpoint.state)
    prefixes = find_prefixes(state)
    part = backbone_part(state)
    bare = len(part) == len(checkpoint.state) and rename_resnet(part)[0].keys() == checkpoint.state.keys()
    return [] if prefixes == [""] and bare else prefixes


def matches_lightly(checkpoint: Checkpoint) -> bool:
    """Return whether this is a Lightning module, a list of layers or a ``backbone`` with a known network inside."""
    prefixes = _prefixes(checkpoint)
    if LIGHTNING in payload_fields(checkpoint.payload):
        return bool(prefixes) or any(key.startswith("backbone.") for key in checkpoint.state)
    by_place = "0.weight" in backbone_part(without_wrappers(checkpoint.state), prefixes[0]) if prefixes else False
    return by_place or any("backbone" in prefix for prefix in prefixes)


def matches_generic(checkpoint: Checkpoint) -> bool:
    """Return whether a known network is below some prefix."""
    return bool(_prefixes(checkpoint))

"""ProPos (Huang et al., 2022): two encoders and no clustering head, because its clusters come from k-means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cdc_plugin.checkpoints.formats._clustering import (
    CIFAR10,
    CIFAR20,
    CIFAR_STEM,
    IMAGENET,
    STL10,
    Convention,
    choose_convention,
    is_small_stem,
    load_resnet,
    resnet_shape,
    top_names,
)
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.resnet_keys import rename_places
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.models.architectures import describe

PARTS = {"encoder_q", "projector_q", "encoder_k", "projector_k", "predictor"}
EXTRA_PARTS = {"encoder", "queue", "queue_ptr", "queue_ind"}


def load_propos(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the encoder of ProPos: the moving average, which it clusters, unless the user asks otherwise."""
    branch = wanted.branch or "momentum"
    encoder = checkpoint.below("encoder_k." if branch == "momentum" else "encoder_q.")
    state, stem = rename_places(encoder.state)
    inner = replace(encoder, state=state)
    spec = resnet_shape(inner, wanted, "ProPos")
    candidates: Sequence[Convention] = (IMAGENET, STL10)
    if is_small_stem(spec):
        # The numbers of the layers show whether there is a pool.
        candidates = [replace(c, stem=CIFAR_STEM | {"pool": stem.get("pool", True)}) for c in (CIFAR10, CIFAR20)]
    choice = choose_convention("ProPos", candidates, spec, inner)
    backbone, matched = load_resnet(inner, wanted, choice)
    why = choice.why | {"branch": f"{branch}{'' if wanted.branch else ', which ProPos itself clusters'}"}
    return Loaded(backbone, Origin("ProPos", describe(choice.spec), why=why), matched=matched)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether all parts of ProPos are there, and nothing else."""
    return PARTS <= top_names(checkpoint.state) <= PARTS | EXTRA_PARTS

"""ProPos (Huang et al., 2022): two encoders and no clustering head, because its clusters come from k-means."""

from dataclasses import replace

from cdc_plugin.checkpoints.formats._clustering import CIFAR_STEM, IMAGENET, STL10, find_cifar, load_resnet, top_names
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.resnet_keys import rename_places
from cdc_plugin.checkpoints.read import Checkpoint

PARTS = {"encoder_q", "projector_q", "encoder_k", "projector_k", "predictor"}
EXTRA_PARTS = {"encoder", "queue", "queue_ptr", "queue_ind"}


def load_propos(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the encoder of ProPos: the moving average, which it clusters, unless the user asks otherwise."""
    branch = wanted.branch or "momentum"
    encoder = checkpoint.below("encoder_k." if branch == "momentum" else "encoder_q.")
    state, stem = rename_places(encoder.state)
    # The numbers of the layers show whether there is a pool.
    small = [replace(cifar, stem=CIFAR_STEM | {"pool": stem.get("pool", True)}) for cifar in find_cifar(None)]
    inner = replace(encoder, state=state)
    backbone, matched, why = load_resnet(inner, wanted, "ProPos", "", small, (IMAGENET, STL10))
    why["branch"] = f"{branch}{'' if wanted.branch else ', which ProPos itself clusters'}"
    return Loaded(backbone, Origin("ProPos, or CoNR that extends it", why=why), matched=matched)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether all parts of ProPos are there, and nothing else."""
    return PARTS <= top_names(checkpoint.state) <= PARTS | EXTRA_PARTS

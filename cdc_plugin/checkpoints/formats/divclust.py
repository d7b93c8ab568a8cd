"""DivClust (Metaxas et al., 2023) on CC: a ResNet whose stem is a stage of its own, and several clusterings at once."""

import re
from dataclasses import replace

from torch import nn

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.cc import CC_HEAD, CC_INPUTS
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.errors import CheckpointError

LAYERS, STEM = ("clu_mlp.0", "clu_mlp.2"), "backbone.layer0.0.weight"


def load_divclust(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone and one of the clusterings, which the file does not rank."""
    clustering.refuse_branch(wanted, checkpoint)
    state = {
        re.sub(r"^backbone\.layer0\.0\.", "backbone.conv1.", key): value for key, value in checkpoint.state.items()
    }
    state = {re.sub(r"^backbone\.layer0\.1\.", "backbone.bn1.", key): value for key, value in state.items()}
    renamed = replace(checkpoint, state=state)
    backbone, matched, why = clustering.load_resnet(
        renamed, wanted, "DivClust", "backbone.", CC_INPUTS, CC_INPUTS, known=("mean", "std")
    )
    backbone.inferred += ("stem.pool",)  # of its three stems two have none
    why |= dict.fromkeys(("mean", "std"), "DivClust does not normalise, as CC")
    parts = [state.get(f"{layer}.{part}") for layer in LAYERS for part in ("weight", "bias")]
    shapes = [None if part is None else tuple(part.shape) for part in parts]
    if any(shape is None or len(shape) != 3 or shape[0] != state[f"{LAYERS[0]}.weight"].shape[0] for shape in shapes):
        raise CheckpointError(f"{checkpoint.path} has clusterings of unlike shapes ({shapes}); copy it again")
    number, why["head"] = clustering.choose_head(checkpoint, len(state[f"{LAYERS[0]}.weight"]), wanted)
    heads: tuple[nn.Module, ...] = ()
    if number is not None:
        weights = {f"{layer[-1]}.weight": state[f"{layer}.weight"][number] for layer in LAYERS}
        weights |= {f"{layer[-1]}.bias": state[f"{layer}.bias"][number].flatten() for layer in LAYERS}
        source = f"{checkpoint.path} (clustering {number})"
        heads = (clustering.load_layered_head(weights, CC_HEAD, backbone.feature_dim, source),)
    return Loaded(backbone, Origin("DivClust", clustering.read_epoch(checkpoint), why), heads, matched)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether several clusterings stand on such a ResNet."""
    weights = checkpoint.state.get(f"{LAYERS[0]}.weight")
    return STEM in checkpoint.state and weights is not None and weights.ndim == 3

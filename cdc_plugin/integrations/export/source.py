"""The model to export, and the check that another library's network computes the same from its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.load import Wanted, load_checkpoint
from cdc_plugin.checkpoints.weights import compare, load_strictly
from cdc_plugin.errors import CheckpointError
from cdc_plugin.models.architectures import build, describe, skeleton
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer

# Largest difference of features, as a share of the largest feature, that counts as none.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Source:
    """A backbone with the head that predicts, if there is one.

    Args:
        name: the path it came from, for messages.
        epochs: how long it was trained, where known.
        model: the whole model, where the user gave one in memory.
    """

    name: str
    backbone: Backbone
    head: nn.Module | None = None
    epochs: int | None = None
    model: Clusterer | None = None

    @property
    def network(self) -> str:
        return describe(self.backbone.spec)

    def weights(self) -> dict[str, Tensor]:
        """Return the backbone's weights on the CPU, each with its own memory, as file formats require."""
        state = self.backbone.module.state_dict()
        return {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}

    def input_facts(self) -> dict[str, Any]:
        """Return mean, std and image size as plain numbers, without float32 noise."""
        backbone = self.backbone
        mean, std = ([round(number, 6) for number in values.tolist()] for values in (backbone.mean, backbone.std))
        return {"mean": mean, "std": std, "input_size": backbone.input_size}


def open_source(
    model: str | Path | Clusterer | Backbone | Source, format: str | None = None, arch: str | None = None
) -> Source:
    """Return the model to export, in evaluation mode.

    Raises:
        CheckpointError: the network's stem is only guessed, which an export must not state as a fact.
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, Clusterer):
        source = Source("the model", model.backbone.eval(), model.calibration_head.eval(), model=model.eval())
    elif isinstance(model, Backbone):
        source = Source("the backbone", model.eval())
    else:
        loaded = load_checkpoint(model, format, Wanted(arch=arch))
        head = loaded.heads[-1].eval() if loaded.heads else None  # of two, the calibration head comes last
        source = Source(str(model), loaded.backbone.eval(), head, loaded.origin.epoch)
    guessed = [fact.removeprefix("stem.") for fact in source.backbone.inferred if fact.startswith("stem.")]
    if guessed:
        raise CheckpointError(
            f"{source.name} does not state its stem's {', '.join(guessed)}, which only images can show; "
            "run cdc-refine on it and export the result folder"
        )
    return source


def note_assumptions(source: Source) -> tuple[str, ...]:
    """Return a line on what the checkpoint did not state, so that the export assumes it; empty if nothing."""
    facts = source.backbone.inferred
    return (f"{source.name} does not state {', '.join(facts)}: the usual values were assumed",) if facts else ()


def find_equal_network(source: Source, specs: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first spec whose network takes the weights and computes the same features from them."""
    state = source.weights()
    for spec in specs:
        if not compare(skeleton(spec), state):
            network, _ = build(spec)
            load_strictly(network, state, source.name)
            if compute_same_features(source.backbone, network):
                return spec
    return None


@torch.no_grad()
def compute_same_features(backbone: Backbone, network: nn.Module) -> bool:
    """Return whether a network computes the backbone's features: padding, pooling, attention heads have no weights."""
    device = backbone.mean.device
    side = backbone.input_size
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = backbone.eval()(images.to(device)).cpu()
    actual = network.cpu().eval()(images)
    if not isinstance(actual, Tensor) or actual.flatten(1).shape != expected.shape:
        return False
    return bool((actual.flatten(1) - expected).abs().max() <= TOLERANCE * expected.abs().max())

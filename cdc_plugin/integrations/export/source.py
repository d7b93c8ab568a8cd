"""What is exported, and the proof that another library's network computes the same from the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.load import Wanted, load_checkpoint
from cdc_plugin.checkpoints.weights import compare, load_strictly
from cdc_plugin.errors import UserError
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
        """The backbone's weights on the CPU, each with memory of its own, as file formats want them."""
        state = self.backbone.module.state_dict()
        return {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}

    def input_facts(self) -> dict[str, Any]:
        """Mean, std and image side as plain numbers; float32 noise is not passed on."""
        backbone = self.backbone
        mean, std = ([round(number, 6) for number in values.tolist()] for values in (backbone.mean, backbone.std))
        return {"mean": mean, "std": std, "input_size": backbone.input_size}


def open_source(
    model: str | Path | Clusterer | Backbone | Source, format: str | None = None, arch: str | None = None
) -> Source:
    """The model to export, in evaluation mode; guesses about its network are not passed on as facts."""
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
        raise UserError(
            f"{source.name} does not state its stem's {', '.join(guessed)}, which only images can settle; "
            "run cdc-refine on it and export the result folder"
        )
    return source


def assumed_note(source: Source) -> tuple[str, ...]:
    """A line on what the checkpoint did not state and the export therefore passes on as an assumption."""
    facts = source.backbone.inferred
    return (f"{source.name} does not state {', '.join(facts)}: what is usual for it was taken",) if facts else ()


def twin(source: Source, specs: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The first spec whose network takes the weights and computes the same features from them."""
    state = source.weights()
    for spec in specs:
        if not compare(skeleton(spec), state):
            network, _ = build(spec)
            load_strictly(network, state, source.name)
            if computes_alike(source.backbone, network):
                return spec
    return None


@torch.no_grad()
def computes_alike(backbone: Backbone, network: nn.Module) -> bool:
    """Whether a network gives the backbone's features; padding, pooling and attention heads have no weights."""
    device = backbone.mean.device
    side = backbone.input_size
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = backbone.eval()(images.to(device)).cpu()
    found = network.cpu().eval()(images)
    if not isinstance(found, Tensor) or found.flatten(1).shape != expected.shape:
        return False
    return bool((found.flatten(1) - expected).abs().max() <= TOLERANCE * expected.abs().max())

"""TEMI (Adaloglou et al., 2023): an ensemble of heads on the embeddings of another network."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, find_state_dict, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import load_strictly, strip_prefix
from cdc_plugin.errors import CheckpointError, option, shorten
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

TEMPERATURE = 0.1  # of the teacher, the default of its script
BEST = "head.best_head_idx"
STATISTICS = (("embed_mean", 0), ("embed_std", 1))  # with what leaves embeddings as they are


def load_temi(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the scale that embeddings are brought to as the backbone, and the head whose loss was lowest."""
    payload, source = payload_fields(checkpoint.payload), str(checkpoint.path)
    args = payload_fields(payload.get("args"))
    network = f" ({args['arch'][:80]})" if isinstance(args.get("arch"), str) else ""
    state = checkpoint.state  # the teacher's, which is evaluated
    if wanted.branch == "online" and "student" in payload:
        state = find_state_dict(payload["student"], source)
    if any(key.startswith("backbone.") for key in state):
        raise CheckpointError(
            f"{source} holds heads of TEMI and the network{network} trained with them, which is not read; pass that "
            f"network as {option('backbone', 'timm:NAME')} and the number of clusters"
        )
    if wanted.arch is not None:
        raise CheckpointError(f"{source} states its own layers; leave out {option('arch', wanted.arch)}")
    epoch = whole_number(payload.get("epoch"))
    count = len({key.split(".")[2] for key in state if key.startswith("head.heads.")})
    best = whole_number(state[BEST]) if BEST in state and epoch != 0 else None  # before the first epoch none is better
    number, why = clustering.choose_head(checkpoint, count, wanted, best)
    temperature = args.get("teacher_temp", TEMPERATURE)
    if not isinstance(temperature, float) or not 1e-3 <= temperature <= 100:
        raise CheckpointError(f"{source}: teacher_temp lies between 0.001 and 100; found {shorten(temperature)}")
    head = _build_head(strip_prefix(state, f"head.heads.{number or 0}."), args, f"{source} (head {number or 0})")
    head.divide_logits(temperature)
    inputs = next(int(layer[1]) for layer in head.layers if layer[0] == "linear")
    backbone = _build_scaler(state, inputs, source)
    facts = {
        "head": why,
        "temperature": f"{temperature}, {'as stated' if 'teacher_temp' in args else 'the default of its script'}",
        "features": f"embeddings of another network{network}",
    }
    return Loaded(backbone, Origin("TEMI", epoch, facts), () if number is None else (head,))


def _build_head(state: Mapping[str, Tensor], args: Mapping[str, Any], source: str) -> LayeredHead:
    """Return a head as a list of layers, the cosine at its end as a linear layer on rows of unit length."""
    scale, direction = state.get("last_layer.weight_g"), state.get("last_layer.weight_v")
    if scale is None or direction is None or direction.ndim != 2 or scale.shape != (len(direction), 1):
        raise CheckpointError(f"{source} lacks the weights of its last layer; copy it again")
    inner = {key.removeprefix("mlp."): value for key, value in state.items() if key.startswith("mlp.")}
    if "weight" in inner:  # a single layer
        inner = {f"0.{key}": value for key, value in inner.items()}
    if not inner or not all(re.fullmatch(r"\d{1,3}\.\w+", key) for key in inner):
        raise CheckpointError(f"{source} has inner layers of an unknown kind; copy it again")
    kinds = ["normalize"] if args.get("l2_norm") is True else []
    weights: dict[str, Tensor] = {}
    for position in sorted({int(key.split(".")[0]) for key in inner}):
        part = strip_prefix(inner, f"{position}.")
        matrix = part.get("weight", torch.ones(0)).ndim == 2
        kinds += ["gelu"] if matrix and weights else []
        weights |= {f"{len(kinds)}.{name}": value for name, value in part.items()}
        kinds.append("linear" if matrix else "batchnorm")
    kinds += ["gelu"] if args.get("head_final_gelu") is True else []
    kinds += ["normalize", "linear"]
    unit = direction.float() / direction.float().norm(dim=1, keepdim=True)
    last = {"weight": scale.float() * unit, "bias": torch.zeros(len(unit))}
    weights |= {f"{len(kinds) - 1}.{name}": value for name, value in last.items()}
    inputs = next((value.shape[1] for value in weights.values() if value.ndim == 2), 0)
    return clustering.load_layered_head(weights, kinds, inputs, source)


def _build_scaler(state: Mapping[str, Tensor], inputs: int, source: str) -> Backbone:
    """Return the backbone that standardises embeddings as the file says."""
    mean, std = (state.get(name, torch.tensor([float(other)] * inputs)) for name, other in STATISTICS)
    if mean.shape != (inputs,) or std.shape != (inputs,) or not (std > 0).all():
        raise CheckpointError(f"{source}: expected embed_mean and embed_std of {inputs} numbers, std above 0")
    spec = {"family": "features", "spaces": [inputs]}
    scaler, width = build(spec)
    load_strictly(scaler, {"shift": mean.float(), "scale": 1 / std.float()}, source)
    return Backbone(scaler, width, [0.0] * 3, [1.0] * 3, 1, spec)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether these are heads with the statistics of embeddings."""
    names = clustering.top_names(checkpoint.state)
    return BEST in checkpoint.state or {"embed_mean", "embed_std", "head"} <= names

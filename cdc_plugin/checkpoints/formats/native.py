"""Result folders of this package: weights in ``model.safetensors``, the model's description in ``model.json``."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, read_checkpoint, read_sidecars, whole_number
from cdc_plugin.checkpoints.weights import build_backbone, load_strictly, strip_prefix
from cdc_plugin.config.schema import LARGEST_SIDE
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.data.atomic import has_content, read_small_text
from cdc_plugin.data.side import read_side
from cdc_plugin.errors import CheckpointError, option, shorten
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import DESCRIPTION, VERSION, WEIGHTS, digest_model
from cdc_plugin.models.heads import build_head

MOST = {"input_size": LARGEST_SIDE, "feature_dim": 1_000_000}
HUB_DESCRIPTION = "config.json"  # the same content, under the name that the Hugging Face hub wants


def description_file(folder: Path) -> Path:
    """Return the file in which a result folder, or its export for the hub, describes the model."""
    beside = read_sidecars(folder / WEIGHTS)
    exported = _is_ours(beside, HUB_DESCRIPTION) and not _is_ours(beside, DESCRIPTION)
    return folder / (HUB_DESCRIPTION if exported else DESCRIPTION)


def read_native(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return description and tensors of a result folder, or of the ``model.safetensors`` inside it."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no result folder {path}; pass the folder that cdc-refine wrote")
    folder = path if path.is_dir() else path.parent
    description = read_description(folder)
    _check_weights(description, folder / WEIGHTS)
    return description, read_checkpoint(folder / WEIGHTS).state


def read_description(folder: Path) -> dict[str, Any]:
    """Return the description of the model in a result folder, or refuse a folder that is incomplete."""
    file = description_file(folder)
    for needed in (file, folder / WEIGHTS):
        if not has_content(needed):
            raise CheckpointError(f"{folder} has no {needed.name}; is the run unfinished? Let it end first")
    try:
        description = json.loads(read_small_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}); was the run interrupted?") from error
    _check_description(description, file)
    return description


def rebuild_backbone(description: dict[str, Any], tensors: dict[str, Tensor], source: str) -> Backbone:
    """Return the backbone of a result folder, with the input convention it was refined with."""
    record = description["backbone"]
    if not isinstance(record.get("spec"), dict):
        raise CheckpointError(
            f"{source} was refined from a network of the user's own class, which its files cannot rebuild; "
            "pass that network as well: cdc_plugin.load_model(folder, module=network)"
        )
    weights = strip_prefix(tensors, "backbone.") or tensors  # exports have no prefix
    # Backbone keeps its network as ``module``; both spellings of the prefix are taken.
    if weights and all(key.startswith("module.") for key in weights):
        weights = strip_prefix(weights, "module.")
    facts = (record["mean"], record["std"], read_side(record)["input_size"], record.get("inferred", ()))
    return build_backbone(record["spec"], weights, source, *facts)[0]


def rebuild_heads(
    description: dict[str, Any], tensors: dict[str, Tensor], feature_dim: int, source: str
) -> tuple[nn.Module, nn.Module]:
    """Return clustering and calibration head of a result folder."""
    heads, spec = [], description.get("heads")
    for name in ("clustering_head", "calibration_head"):
        weights = strip_prefix(tensors, f"{name}.")
        with torch.device("meta"):  # without memory first: what a file says of its sizes may be absurd
            shapes = {key: value.shape for key, value in build_head(spec, feature_dim, source).state_dict().items()}
        if shapes != {key: weight.shape for key, weight in weights.items()}:
            raise CheckpointError(f"{source} ({name}) does not fit the heads it describes; was it edited by hand?")
        heads.append(build_head(spec, feature_dim, source))
        load_strictly(heads[-1], weights, f"{source} ({name})")
    return heads[0], heads[1]


def rebuild_prototypes(tensors: dict[str, Tensor], feature_dim: int, source: str) -> Prototypes | None:
    """Return the prototypes of a result folder; None if it has none."""
    stored = strip_prefix(tensors, "prototypes.")
    if not stored:
        return None
    centers, whitening, limit = (stored.get(name) for name in ("centers", "whitening", "limit"))
    if centers is None or whitening is None or limit is None or limit.numel() != 1:
        raise CheckpointError(f"{source} has only some of its prototypes; was it edited by hand?")
    if centers.ndim != 2 or centers.shape[1] != feature_dim or whitening.shape != (feature_dim, feature_dim):
        raise CheckpointError(f"{source} has prototypes that do not fit {feature_dim} features; was it edited by hand?")
    return Prototypes(centers.float(), whitening.float(), float(limit))


def _check_description(description: Any, file: Path) -> None:
    if not isinstance(description, dict) or description.get("format") != "cdc_plugin":
        raise CheckpointError(f'{file} does not say "format": "cdc_plugin"; it is not a result of cdc-refine')
    version = description.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(f"{file} has version {version!r}, this release reads up to {VERSION}; upgrade cdc-plugin")
    backbone: Any = description.get("backbone")
    stated = backbone if isinstance(backbone, dict) else {}
    lacking = [k for k in ("spec", "feature_dim", "mean", "std", "input_size") if k not in stated]
    if lacking:
        raise CheckpointError(f"{file} does not state the backbone's {', '.join(lacking)}; was it edited by hand?")
    for name in ("mean", "std"):
        values = backbone[name]
        if not (isinstance(values, list) and len(values) == 3 and all(_is_number(value) for value in values)):
            raise CheckpointError(f"{file}: {name} takes 3 numbers, found {shorten(values)}; was it edited by hand?")
    inferred = backbone.get("inferred", [])
    if not isinstance(inferred, list) or not all(isinstance(name, str) for name in inferred):
        raise CheckpointError(f"{file}: inferred is a list of names, found {shorten(inferred)}; was it edited by hand?")
    for name in ("input_size", "feature_dim"):
        if type(backbone[name]) is not int or not 0 < backbone[name] <= MOST[name]:
            raise CheckpointError(
                f"{file}: {name} is a number, found {shorten(backbone[name])}; was it edited by hand?"
            )


def _check_weights(description: dict[str, Any], file: Path) -> None:
    """Refuse a model that changed since it was written: nothing else would tell, and all results would be off."""
    stated = description.get("sha256")
    if stated is None:  # an earlier release, or another program
        return
    if digest_model(file, description) != stated:
        raise CheckpointError(
            f"{file} or the description beside it has changed since it was written (by its sha256); copy the folder "
            "again, or remove sha256 from the description if the change was meant"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def _is_ours(sidecar: dict[str, Any], name: str) -> bool:
    beside = sidecar.get(name)
    return isinstance(beside, dict) and beside.get("format") == "cdc_plugin" and "weights" not in beside


def _described_by(checkpoint: Checkpoint) -> str | None:
    """Return the name of the description read with a checkpoint: ``X.json`` of an export ``X.pth``, else a folder's."""
    export, weights = f"{checkpoint.path.stem}.json", checkpoint.path.name
    beside = checkpoint.sidecar.get(export)
    if isinstance(beside, dict) and (beside.get("format"), beside.get("weights")) == ("cdc_plugin", weights):
        return export
    return next((name for name in (DESCRIPTION, HUB_DESCRIPTION) if _is_ours(checkpoint.sidecar, name)), None)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a result folder, an export of one, or weights with both heads."""
    # Weights that lost their description are recognised by both heads; then the error names the missing file.
    heads = ("clustering_head.", "calibration_head.")
    both = all(any(key.startswith(head) for key in checkpoint.state) for head in heads)
    return both or _described_by(checkpoint) is not None


def load_native(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone, and the heads if any, of a result folder, a folder of ``cdc-pretrain`` or an export."""
    if wanted.arch is not None:
        raise CheckpointError(f"{checkpoint.path} states its own network; leave out {option('arch', wanted.arch)}")
    name = _described_by(checkpoint)
    if name is None:  # missing, broken or foreign: reading it says which
        name, description = DESCRIPTION, read_description(checkpoint.path.parent)
    else:
        description = checkpoint.sidecar[name]
        _check_description(description, checkpoint.path.with_name(name))
        if checkpoint.path.suffix == ".safetensors":  # by whatever name it was copied
            _check_weights(description, checkpoint.path)
    backbone = rebuild_backbone(description, checkpoint.state, str(checkpoint.path))
    heads: tuple[nn.Module, ...] = ()
    prototypes = None
    if description.get("heads"):  # others may write a backbone alone
        prototypes = rebuild_prototypes(checkpoint.state, backbone.feature_dim, str(checkpoint.path))
        heads = rebuild_heads(description, checkpoint.state, backbone.feature_dim, str(checkpoint.path))
    provenance = payload_fields(description.get("provenance"))
    why = dict.fromkeys(("mean", "std", "input_size"), f"stated in {name}")
    writer = "cdc-pretrain" if provenance.get("tool") == "cdc-pretrain" else "cdc-refine"
    return Loaded(backbone, Origin(writer, whole_number(provenance.get("epochs")), why), heads, prototypes=prototypes)

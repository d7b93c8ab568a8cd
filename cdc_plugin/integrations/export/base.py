"""What all exports share: the model, the check that another library computes the same, and the files that are written.

A description beside the weights lets this package read an export back: weights alone do not say stem, mean and std.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.native import VERSION
from cdc_plugin.checkpoints.load import Wanted, load_checkpoint
from cdc_plugin.checkpoints.read import find_run
from cdc_plugin.checkpoints.weights import compare, load_strictly
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.side import write_side
from cdc_plugin.errors import CheckpointError, OutputError, option
from cdc_plugin.evaluation.models import read_json
from cdc_plugin.models.architectures import build, describe, skeleton
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer

# Largest difference of features, as a share of the largest feature, that counts as none.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    files: tuple[Path, ...]  # the weights first
    network: str  # its name in the other library
    load: tuple[str, ...]  # lines of code, or a command, that load it
    notes: tuple[str, ...] = ()  # caveats for the user


@dataclass(frozen=True)
class Source:
    """A backbone with the head that predicts, if there is one."""

    name: str  # the path it came from, for messages
    backbone: Backbone
    head: nn.Module | None = None
    epochs: int | None = None  # how long it was trained, where known
    model: Clusterer | None = None  # where the user gave a whole one in memory

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
        return {"mean": mean, "std": std, **write_side(backbone.input_size)}

    def note_assumptions(self) -> tuple[str, ...]:
        """Return a line on what the checkpoint did not state, so that the export assumes it; empty if nothing."""
        facts = ", ".join(self.backbone.inferred)
        return (f"{self.name} does not state {facts}: the usual values were assumed",) if facts else ()

    def refuse(self, library: str, more: str = "") -> CheckpointError:
        """Return the error that a library has no network with the source's features."""
        return CheckpointError(
            f"{library} has no network that computes what {self.name} does ({self.network}); "
            + (more or f"{option('to', 'onnx')} takes any network")
        )


def open_source(model: str | Path | Clusterer | Backbone, format: str | None, arch: str | None) -> Source:
    """Return the model to export, in evaluation mode; refuse a guessed stem, which an export would state as a fact."""
    if isinstance(model, Clusterer):
        source = Source("the model", model.backbone.eval(), model.calibration_head.eval(), model=model.eval())
    elif isinstance(model, Backbone):
        source = Source("the backbone", model.eval())
    else:
        model = find_run(model)
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


def random_images(backbone: Backbone, count: int) -> Tensor:
    """Return images in [0, 1] of the size that the backbone takes, or vectors if it takes these."""
    side = backbone.input_size
    shape = (backbone.feature_dim,) if backbone.takes_features else (3, side, side)
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def compute_same_features(backbone: Backbone, network: nn.Module) -> bool:
    """Return whether a network computes the backbone's features: padding, pooling, attention heads have no weights."""
    images = 4 * random_images(backbone, 2) - 2  # as normalised ones are
    expected = backbone.eval()(images.to(backbone.mean.device)).cpu()
    actual = network.cpu().eval()(images)
    if not isinstance(actual, Tensor) or actual.flatten(1).shape != expected.shape:
        return False
    return bool((actual.flatten(1) - expected).abs().max() <= TOLERANCE * expected.abs().max())


def check_folder(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless ``overwrite``, and always one with results of ``cdc-refine``."""
    if out.is_file():
        raise OutputError(f"{out} is a file; give the path of a folder")
    refuse_results(out)
    present = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if present and not overwrite:
        raise OutputError(
            f"{out} is not empty ({', '.join(present[:3])}); give another folder, or {option('overwrite')} to "
            "replace the files of an earlier export in it"
        )


def create_folder(out: Path) -> Path:
    """Create the folder and return it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create the folder {out}: {error.strerror}; give another one") from error
    return out


def check_file(out: Path, suffixes: tuple[str, ...], example: str, overwrite: bool, described: bool = False) -> None:
    """Refuse another suffix, a missing folder and, unless ``overwrite``, a file or description that exists already."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give the path of a file, such as {out / example}")
    if out.suffix.lower() not in suffixes:
        raise OutputError(f"expected a {' or '.join(suffixes)} file, such as {example}; found {out.name}")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"there is no folder {out.absolute().parent} to write {out.name} to; create it first")
    refuse_results(out.absolute().parent)
    for file in (out, out.with_suffix(".json")) if described else (out,):
        if file.exists() and not overwrite:
            raise OutputError(f"{file} already exists; give another path, or {option('overwrite')} to replace it")


def refuse_results(folder: Path) -> None:
    """Refuse the folder of a run, whose weights and description have the same names as those of an export."""
    if (folder / "report.json").is_file() or "heads" in _read_description(folder / "model.json"):
        example = folder / "export"
        raise OutputError(f"{folder} is a result folder of cdc-refine; give another folder, for example {example}")


def write_description(weights: Path, source: Source, spec: dict[str, Any], made: dict[str, Any]) -> Path:
    """Write beside the weights how this package rebuilds their network, and return that file."""
    backbone = {"spec": spec, "feature_dim": source.backbone.feature_dim, **source.input_facts()}
    if source.backbone.inferred:
        backbone["inferred"] = list(source.backbone.inferred)
    provenance = {"exported_from": source.name, "epochs": source.epochs, **made}
    content = {"weights": weights.name, "backbone": backbone, "provenance": provenance}
    return write_json(weights.with_suffix(".json"), {"format": "cdc_plugin", "version": VERSION, **content})


def write_json(file: Path, content: dict[str, Any]) -> Path:
    """Write JSON atomically, and return the file."""
    write_text(file, json.dumps(content, indent=2) + "\n")
    return file


def remove_earlier(folder: Path, suffix: str, keep: Path) -> None:
    """Remove weights of an earlier export under another name, recognised by their description."""
    for file in folder.glob(f"*{suffix}"):
        description = file.with_suffix(".json")
        if file != keep and _read_description(description).get("weights") == file.name:
            file.unlink()
            description.unlink()


def _read_description(file: Path) -> dict[str, Any]:
    content = read_json(file)
    return content if content.get("format") == "cdc_plugin" else {}

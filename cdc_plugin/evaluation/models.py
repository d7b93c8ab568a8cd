"""Open a clustering model of any origin, together with what its own run wrote about it."""

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdc_plugin.checkpoints.formats.native import DESCRIPTION, description_file
from cdc_plugin.checkpoints.load import Wanted, load_checkpoint
from cdc_plugin.checkpoints.load_model import build_clusterer, is_result, load_model
from cdc_plugin.checkpoints.read import find_run
from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.atomic import has_content, read_json_object, read_small_text
from cdc_plugin.errors import CheckpointError, UserError, join_words
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.run_folder import CONFIG, HISTORY, LOG, REPORT, STATE


@dataclass(frozen=True)
class RunRecord:
    """The files that a run of ``cdc-refine`` left beside its model."""

    config: RefineConfig
    settings: str  # its config.yaml, as text
    digest: str  # of the images it was refined on; "" if unknown
    report: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to be evaluated."""

    name: str
    path: str | None  # as the user typed it; None for a model passed as a Python object
    model: Clusterer
    writer: str  # what made it: "cdc-refine", "SCAN (self-labelling)"
    run: RunRecord | None = None  # None for checkpoints of other frameworks
    options: tuple[str, ...] = ()  # the hints that the user gave for reading a checkpoint, as on a command line
    warnings: tuple[str, ...] = ()  # what the quality card said when it was refined

    @property
    def config(self) -> RefineConfig:
        """Return the settings of its run, else the defaults, so that random choices match the end of a run."""
        return self.run.config if self.run is not None else RefineConfig()

    @property
    def network(self) -> str:
        """Describe the network; call it once images have settled what the checkpoint left open."""
        return describe(self.model.backbone.spec)

    @property
    def heads(self) -> int:
        return 1 if self.model.clustering_head is self.model.calibration_head else 2

    @property
    def foreign(self) -> bool:
        """Return whether another framework wrote it, so that it can still be refined."""
        return self.path is not None and not is_result(Path(self.path))


def open_model(
    model: str | Path | Clusterer, *, format: str | None = None, arch: str | None = None, head: int | None = None
) -> EvaluatedModel:
    """Open a model in evaluation mode with the record of its run; refuse what has no clusters (yet)."""
    if isinstance(model, Clusterer):
        return EvaluatedModel("model", None, model.eval(), "the caller")
    model = find_run(model)
    path = Path(os.path.expanduser(model))
    if not path.exists() and not str(model).startswith(("timm:", "hf-hub:")):
        names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
        near = ", ".join(difflib.get_close_matches(path.name, names, n=3))
        raise CheckpointError(
            f"there is no model {path}{f'; {path.parent} has {near}' if near else ''}; name a result folder or a "
            "clustering checkpoint"
        )
    if path.name == STATE and (path.parent / CONFIG).is_file():
        path = path.parent  # the state of a run is not a model; the run may have one
    _refuse_unfinished(path)
    if path.exists() and is_result(path):
        folder = path if path.is_dir() else path.parent
        warnings = _provenance(folder).get("warnings")
        told = tuple(map(str, warnings)) if isinstance(warnings, list) else ()
        return EvaluatedModel(
            _name(folder),
            str(path),
            load_model(path),
            "cdc-refine",
            read_run(folder),
            warnings=told,
        )
    loaded = load_checkpoint(path if path.exists() else model, format, Wanted(arch, head=head))
    hints = {"--format": format, "--arch": arch, "--head": head}
    options = tuple(word for name, value in hints.items() if value is not None for word in (name, str(value)))
    return EvaluatedModel(_name(path), str(model), build_clusterer(loaded, model), loaded.origin.writer, None, options)


def read_run(folder: Path) -> RunRecord | None:
    """Return the record of a finished run, or None where only the model was kept."""
    if not has_content(folder / CONFIG):
        return None
    return RunRecord(
        load_config(folder / CONFIG),
        read_small_text(folder / CONFIG),
        str(_provenance(folder).get("data_digest") or ""),
        read_json(folder / REPORT),
        _read_history(folder / HISTORY),
    )


def distinct_names(models: list[EvaluatedModel]) -> list[str]:
    """Return a different name for each model, usable as a folder: its own, else its parent's, else numbered."""
    own_names = [model.name for model in models]
    names = [
        Path(model.path).absolute().parent.name or name if model.path and own_names.count(name) > 1 else name
        for model, name in zip(models, own_names, strict=True)
    ]
    return [
        f"{name}-{names[:place].count(name) + 1}" if name in names[:place] else name for place, name in enumerate(names)
    ]


def _refuse_unfinished(folder: Path) -> None:
    """Refuse a run in progress, which has a state and no model; say how far it is and how to resume it."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {LOG}:
        raise CheckpointError(f"{folder} holds only the log of a run that could not start; {folder / LOG} says why")
    if (folder / DESCRIPTION).is_file() or not (folder / CONFIG).is_file():
        return
    try:
        config: RefineConfig = load_config(folder / CONFIG)
    except UserError:  # a config.yaml of another program
        return
    done = len(_read_history(folder / HISTORY))
    raise CheckpointError(
        f"{folder} holds an unfinished run (epoch {done} of {config.epochs}); finish it first: "
        f"cdc-refine --resume --out {join_words([folder])}"
    )


def _provenance(folder: Path) -> dict[str, Any]:
    provenance = read_json(description_file(folder)).get("provenance")
    return provenance if isinstance(provenance, dict) else {}


def _name(path: Path) -> str:
    name = path.absolute().name
    for suffix in (".tar", ".pth", ".pt", ".ckpt", ".bin", ".safetensors"):
        name = name.removesuffix(suffix)
    return name or "model"


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where there is none, as its content is optional."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return {}


def _read_history(file: Path) -> list[dict[str, Any]]:
    try:
        epochs = [json.loads(line) for line in read_small_text(file).splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError):
        return []
    return [epoch for epoch in epochs if isinstance(epoch, dict)]

"""What an evaluation is about: a clustering model of any origin, and what its own run has written about it."""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdc_plugin.checkpoints.formats.native import DESCRIPTION, description_file
from cdc_plugin.checkpoints.load import Wanted, load_checkpoint
from cdc_plugin.checkpoints.load_model import build_clusterer, is_result, load_model
from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.run_folder import CONFIG, HISTORY, LOG, REPORT, STATE


@dataclass(frozen=True)
class RunRecord:
    """What a run of ``cdc-refine`` left beside its model.

    Args:
        digest: of the images it was refined on; "" where unknown.
        settings: its config.yaml, as text.
    """

    config: RefineConfig
    settings: str
    digest: str
    report: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to be evaluated.

    Args:
        path: what the user gave; None for a model given in Python.
        writer: what made it: "cdc-refine", "SCAN (self-labelling)".
        run: None for checkpoints of others.
        options: what the user said of a checkpoint, as words of a command line.
        warnings: what the quality card said when it was refined.
    """

    name: str
    path: str | None
    model: Clusterer
    writer: str
    run: RunRecord | None = None
    options: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """In words; images may settle what the checkpoint left open, so it is asked for after that."""
        return describe(self.model.backbone.spec)

    @property
    def heads(self) -> int:
        return 1 if self.model.clustering_head is self.model.calibration_head else 2

    @property
    def foreign(self) -> bool:
        """Whether it is somebody else's model, which can be refined."""
        return self.path is not None and not is_result(Path(self.path))


def open_model(
    model: str | Path | Clusterer, *, format: str | None = None, arch: str | None = None, head: int | None = None
) -> EvaluatedModel:
    """Open a model in evaluation mode with all that is known of it; refuse what has no clusters (yet)."""
    if isinstance(model, Clusterer):
        return EvaluatedModel("model", None, model.eval(), "the caller")
    path = Path(model).expanduser()
    if not path.exists() and not str(model).startswith(("timm:", "hf-hub:")):
        raise UserError(f"there is no model {path}{_nearby(path)}; give a result folder or a clustering checkpoint")
    if path.name == STATE and (path.parent / CONFIG).is_file():
        path = path.parent  # the state of a run is not a model; the run may have one
    _refuse_unfinished(path)
    if path.exists() and is_result(path):
        found = load_model(path)
        folder = path if path.is_dir() else path.parent
        said = _provenance(folder).get("warnings") or ()
        return EvaluatedModel(
            _name(folder), str(path), found, "cdc-refine", read_run(folder), warnings=tuple(map(str, said))
        )
    loaded = load_checkpoint(path if path.exists() else model, format, Wanted(arch, head=head))
    given = {"--format": format, "--arch": arch, "--head": head}
    options = tuple(word for name, value in given.items() if value is not None for word in (name, str(value)))
    return EvaluatedModel(_name(path), str(model), build_clusterer(loaded, model), loaded.origin.writer, None, options)


def read_run(folder: Path) -> RunRecord | None:
    """Return the record of a finished run, or None where only the model was kept."""
    if not (folder / CONFIG).is_file():
        return None
    return RunRecord(
        load_config(folder / CONFIG),
        (folder / CONFIG).read_text(encoding="utf-8"),
        str(_provenance(folder).get("data_digest") or ""),
        _read_json(folder / REPORT),
        _read_history(folder / HISTORY),
    )


def distinct_names(subjects: list[EvaluatedModel]) -> list[str]:
    """One name a model, usable as a folder: its own, its parent's where several are called alike, else numbered."""
    own = [subject.name for subject in subjects]
    names = [
        Path(subject.path).absolute().parent.name or name if subject.path and own.count(name) > 1 else name
        for subject, name in zip(subjects, own, strict=True)
    ]
    return [
        f"{name}-{names[:place].count(name) + 1}" if name in names[:place] else name for place, name in enumerate(names)
    ]


def _refuse_unfinished(folder: Path) -> None:
    """Refuse a run in progress, which has a state and no model; say how far it is and how to resume it."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {LOG}:
        raise UserError(f"{folder} holds only the log of a run that could not start; {folder / LOG} says why")
    if (folder / DESCRIPTION).is_file() or not (folder / CONFIG).is_file():
        return
    try:
        epochs = load_config(folder / CONFIG).epochs
    except UserError:  # somebody else's config.yaml
        return
    done = len(_read_history(folder / HISTORY))
    raise UserError(
        f"{folder} holds an unfinished run (epoch {done} of {epochs}); let it end first: "
        f"cdc-refine --resume --out {shlex.quote(str(folder))}"
    )


def _provenance(folder: Path) -> dict[str, Any]:
    found = _read_json(description_file(folder)).get("provenance")
    return found if isinstance(found, dict) else {}


def _nearby(path: Path) -> str:
    names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; {path.parent} has {', '.join(near)}" if near else ""


def _name(path: Path) -> str:
    name = path.absolute().name
    for suffix in (".tar", ".pth", ".pt", ".ckpt", ".bin", ".safetensors"):
        name = name.removesuffix(suffix)
    return name or "model"


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where there is none, as its content is optional."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_history(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError):
        return []

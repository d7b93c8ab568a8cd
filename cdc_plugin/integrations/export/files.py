"""Files of an export: never over others unasked, each whole or not at all, with a description beside them.

The description lets this package read the export back exactly, stem, mean and std included, which the weights
alone do not tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdc_plugin.checkpoints.formats.native import VERSION
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.export.source import Source


@dataclass(frozen=True)
class Written:
    """What an export left behind.

    Args:
        files: the weights first.
        network: the name that the other library has for it.
        load: lines of code, or a command, that load it there.
        notes: what the user should know before using it.
    """

    files: tuple[Path, ...]
    network: str
    load: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_folder(out: Path, overwrite: bool) -> None:
    """A full folder is written to only if asked, one with results of ``cdc-refine`` never."""
    if out.is_file():
        raise UserError(f"--out {out} is a file; give the path of a folder")
    if not out.is_dir():
        return
    refuse_results(out)
    present = sorted(path.name for path in out.iterdir())
    if present and not overwrite:
        raise UserError(
            f"{out} is not empty ({', '.join(present[:3])}); give another --out, or --overwrite to replace the "
            "files of an earlier export in it"
        )


def make_folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; give another --out") from error
    return out


def check_file(out: Path, suffixes: tuple[str, ...], example: str, overwrite: bool) -> None:
    """A file is written to a folder that is there, and over another only if asked."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give the path of a file, such as {out / example}")
    if out.suffix.lower() not in suffixes:
        raise UserError(f"--out takes a {' or '.join(suffixes)} file here, such as {example}; found {out.name}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.absolute().parent} to write {out.name} to")
    refuse_results(out.absolute().parent)
    check_free(out, overwrite)


def check_free(file: Path, overwrite: bool) -> None:
    if file.exists() and not overwrite:
        raise UserError(f"{file} is already there; give another --out, or --overwrite to replace it")


def refuse_results(folder: Path) -> None:
    """The weights and descriptions of a run have the names of an export's: keep out of its folder."""
    if (folder / "report.json").is_file() or "heads" in _description(folder / "model.json"):
        raise UserError(f"{folder} is a result folder of cdc-refine; give another --out, a folder below it say")


def companion(weights: Path) -> Path:
    """Where the description of a weights file is kept."""
    return weights.with_suffix(".json")


def write_description(weights: Path, source: Source, spec: dict[str, Any], made: dict[str, Any]) -> Path:
    """Say beside the weights how this package builds their network again.

    Args:
        made: what else is worth knowing: for which library, under which name, how it is loaded.
    """
    file = companion(weights)
    backbone = {"spec": spec, "feature_dim": source.backbone.feature_dim, **source.input_facts()}
    if source.backbone.inferred:
        backbone["inferred"] = list(source.backbone.inferred)
    provenance = {"exported_from": source.name, "epochs": source.epochs, **made}
    write_json(
        file,
        {
            "format": "cdc_plugin",
            "version": VERSION,
            "weights": weights.name,
            "backbone": backbone,
            "provenance": provenance,
        },
    )
    return file


def write_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))


def remove_earlier(folder: Path, suffix: str, keep: Path) -> None:
    """Take away weights that an earlier export put there under another name, told by their description."""
    for file in folder.glob(f"*{suffix}"):
        if file != keep and _description(companion(file)).get("weights") == file.name:
            file.unlink()
            companion(file).unlink()


def _description(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == "cdc_plugin" else {}

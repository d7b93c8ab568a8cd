"""Files of an export: existing ones are replaced only on request, and a description is written beside the weights.

The description lets this package read the export back exactly: the weights alone do not say stem, mean and std.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdc_plugin.checkpoints.formats.native import VERSION
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import OutputError, option
from cdc_plugin.integrations.export.source import Source


@dataclass(frozen=True)
class Export:
    """The result of an export.

    Args:
        files: the weights first.
        network: its name in the other library.
        load: lines of code, or a command, that load it.
        notes: caveats for the user.
    """

    files: tuple[Path, ...]
    network: str
    load: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_folder(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless ``overwrite``, and always one with results of ``cdc-refine``."""
    if out.is_file():
        raise OutputError(f"{out} is a file; give the path of a folder")
    if not out.is_dir():
        return
    refuse_results(out)
    present = sorted(path.name for path in out.iterdir())
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


def check_file(out: Path, suffixes: tuple[str, ...], example: str, overwrite: bool) -> None:
    """Refuse a file with another suffix, without a parent folder, or that exists, unless ``overwrite``."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give the path of a file, such as {out / example}")
    if out.suffix.lower() not in suffixes:
        raise OutputError(f"expected a {' or '.join(suffixes)} file, such as {example}; found {out.name}")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"there is no folder {out.absolute().parent} to write {out.name} to; create it first")
    refuse_results(out.absolute().parent)
    check_free(out, overwrite)


def check_free(file: Path, overwrite: bool) -> None:
    """Refuse a file that exists, unless ``overwrite``."""
    if file.exists() and not overwrite:
        raise OutputError(f"{file} already exists; give another path, or {option('overwrite')} to replace it")


def refuse_results(folder: Path) -> None:
    """Refuse the folder of a run, whose weights and description have the same names as those of an export."""
    if (folder / "report.json").is_file() or "heads" in _read_description(folder / "model.json"):
        raise OutputError(
            f"{folder} is a result folder of cdc-refine; give another folder, for example {folder / 'export'}"
        )


def find_description(weights: Path) -> Path:
    """Return where the description of a weights file is kept."""
    return weights.with_suffix(".json")


def write_description(weights: Path, source: Source, spec: dict[str, Any], made: dict[str, Any]) -> Path:
    """Write beside the weights how this package rebuilds their network, and return that file.

    Args:
        made: for which library, under which name, and how it is loaded.
    """
    file = find_description(weights)
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
    """Write JSON atomically."""
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))


def remove_earlier(folder: Path, suffix: str, keep: Path) -> None:
    """Remove weights of an earlier export under another name, recognised by their description."""
    for file in folder.glob(f"*{suffix}"):
        if file != keep and _read_description(find_description(file)).get("weights") == file.name:
            file.unlink()
            find_description(file).unlink()


def _read_description(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == "cdc_plugin" else {}

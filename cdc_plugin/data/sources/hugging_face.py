"""Hugging Face data sets: objects, folders that save_to_disk wrote, parquet files, and data sets of the hub by name.

Needs ``pip install cdc-plugin[data]``. Labels are for reporting only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.decode import decode_bytes, decode_file, to_rgb
from cdc_plugin.data.sources.base import ImageSource, UnreadableImageError, digest_of
from cdc_plugin.data.sources.folder import WORKERS
from cdc_plugin.data.sources.folder_index import is_image_name, state_of
from cdc_plugin.data.sources.objects import UNLABELLED
from cdc_plugin.errors import UserError

HUB = "hf:"
LABEL_COLUMNS = ("label", "labels", "fine_label")


def is_hugging_face(source: object) -> bool:
    """Whether this is an object of the package ``datasets``, of whatever kind."""
    return "datasets" in sys.modules and type(source).__module__.split(".")[0] == "datasets"


def is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def parquet_files(path: Path) -> list[str] | None:
    """A parquet file, or those of a folder that holds no images; None for any other path."""
    if path.is_dir():
        with os.scandir(path) as found:
            names = sorted(item.name for item in found if not item.name.startswith("."))
        tables = [str(path / name) for name in names if name.lower().endswith(".parquet")]
        return tables if tables and not any(is_image_name(name) for name in names) else None
    return [str(path)] if path.suffix.lower() == ".parquet" and path.is_file() else None


def hub_source(name: str, side: int) -> ImageSource:
    """``hf:NAME`` or ``hf:NAME:SPLIT`` as ``datasets.load_dataset`` fetches it."""
    title, _, split = name.removeprefix(HUB).partition(":")
    datasets = _package()
    try:
        loaded = datasets.load_dataset(title, split=split or None)
    except Exception as error:  # the package, its file systems and the network raise all kinds of error
        raise UserError(
            f"{name} can not be loaded ({_first_line(error)}); expected hf:NAME:SPLIT such as hf:ylecun/mnist:train, "
            "and the network or a data set that is in the cache of Hugging Face"
        ) from error
    return hugging_face_source(loaded, side, name)


def saved_source(path: Path, side: int) -> ImageSource:
    """A folder that ``save_to_disk`` wrote."""
    datasets = _package()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{path}: no data set that can be loaded ({_first_line(error)}); save it again") from error
    return hugging_face_source(loaded, side, str(path))


def parquet_source(files: list[str], side: int, description: str) -> ImageSource:
    """Parquet files with a column of images: structs of ``bytes`` and ``path``, as ``to_parquet`` writes them."""
    datasets = _package()
    try:
        loaded = datasets.Dataset.from_parquet(files)
    except Exception as error:
        which, reason = next(_damaged(files), (description, _first_line(error)))
        raise UserError(f"{which} can not be read as parquet ({reason}); write it again") from error
    return hugging_face_source(loaded, side, description)


def _damaged(files: list[str]) -> Iterator[tuple[str, str]]:
    """Files that are no parquet, and why."""
    from pyarrow import parquet

    for file in files:
        try:
            parquet.read_metadata(file)
        except Exception as error:
            yield file, _first_line(error)


def hugging_face_source(dataset: Any, side: int, description: str | None = None) -> ImageSource:
    """A ``datasets.Dataset``; its first column of images is read, the path or the bytes of each as they are stored."""
    datasets = _package()
    said = description or type(dataset).__name__
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = list(dataset)
        if len(splits) > 1:
            how = _how_to_choose(said, splits[0], description)
            raise UserError(f"{said} has the splits {', '.join(splits)}; give one of them: {how}")
        dataset = dataset[splits[0]]
    if not isinstance(dataset, datasets.Dataset):
        raise UserError(f"{said} is a {type(dataset).__name__}, which has no length; load it with streaming=False")
    if len(dataset) == 0:
        raise UserError(f"the data set {said} is empty; expected at least one image")
    column = _image_column(dataset)
    labels, class_names = _labels(dataset)
    stored = dataset.with_format(None).select_columns([column])
    stored = stored.cast_column(column, datasets.Image(decode=False))

    def read(index: int) -> Image.Image:
        try:
            value = stored[index][column]
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
        return _decoded(value, side)

    return ImageSource(
        content=read,
        names=[str(index) for index in range(len(dataset))],
        labels=labels,
        class_names=class_names,
        digest=digest_of(["hugging face", stored._fingerprint, column, str(len(dataset)), *_states(dataset)]),
        description=said,
        workers=WORKERS,
        exact=_holds_files(stored[0][column]),
    )


def _states(dataset: Any) -> list[str]:
    """Size and time of the files behind a data set; its fingerprint is what its notes say, not what they hold."""
    return [str(state_of(file["filename"])) for file in dataset.cache_files]


def _holds_files(value: Any) -> bool:
    """Whether the images are in the data set itself; files it points at may change without its fingerprint."""
    return isinstance(value, dict) and value.get("bytes") is not None


def _decoded(value: Any, side: int) -> Image.Image:
    if isinstance(value, Image.Image):
        return to_rgb(value)
    if value is None:
        raise UnreadableImageError("there is no image in this row")
    if value.get("bytes") is not None:
        return decode_bytes(value["bytes"], side)
    return decode_file(str(value.get("path")), side)


def _image_column(dataset: Any) -> str:
    """The first column of images by its type, else the first that holds the bytes of an image file."""
    from datasets import Image as ImageFeature

    for name, feature in dataset.features.items():
        if isinstance(feature, ImageFeature) or (isinstance(feature, dict) and {"bytes", "path"} <= set(feature)):
            return name
    row = dataset.with_format(None)[0]
    for name, value in row.items():
        if isinstance(value, bytes):
            return name
    raise UserError(
        f"no column of images: expected one of the type datasets.Image; found {', '.join(dataset.column_names)}; "
        "cast it: data.cast_column(name, datasets.Image())"
    )


def _labels(dataset: Any) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    from datasets import ClassLabel

    for name in LABEL_COLUMNS:
        feature = dataset.features.get(name)
        classes = feature.names if isinstance(feature, ClassLabel) else None
        if classes is None and not str(getattr(feature, "dtype", "")).startswith(("int", "uint")):
            continue
        values = dataset.with_format(None).select_columns([name])[:][name]
        # -1 is what data sets without public labels have.
        known = [UNLABELLED if value is None or value < 0 else value for value in values]
        return np.array(known, dtype=np.int64), classes
    return None, None


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "Hugging Face data sets need the package datasets; type: pip install cdc-plugin[data]"
        ) from error
    return datasets


def _how_to_choose(said: str, split: str, description: str | None) -> str:
    if description is None:
        return f"data[{split!r}]"
    return f"{said}:{split}" if said.startswith(HUB) else str(Path(said) / split)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

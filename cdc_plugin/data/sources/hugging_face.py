"""Describe Hugging Face data sets: objects, folders of save_to_disk, parquet files, and those of the hub by name."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import UnreadableImageError, decode_bytes, decode_file
from cdc_plugin.data.sources.base import UNLABELLED, WORKERS, ImageSource, read_state
from cdc_plugin.errors import DataError

HUB = "hf:"
LABEL_COLUMNS = ("label", "labels", "fine_label")


def describe_hub_dataset(name: str, side: int) -> ImageSource:
    """Return a source of ``hf:NAME`` or ``hf:NAME:SPLIT`` as ``datasets.load_dataset`` fetches it."""
    title, _, split = name.removeprefix(HUB).partition(":")
    datasets = _import_datasets()
    try:
        loaded = datasets.load_dataset(title, split=split or None, trust_remote_code=False)
    except Exception as error:  # the package, its file systems and the network raise all kinds of error
        raise DataError(
            f"{name} cannot be loaded ({_first_line(error)}); expected hf:NAME:SPLIT such as hf:ylecun/mnist:train, "
            "and the network or a data set that is in the cache of Hugging Face"
        ) from error
    return describe_hugging_face(loaded, side, name)


def describe_saved_dataset(source: str, side: int) -> ImageSource:
    """Return a source of a folder that ``save_to_disk`` wrote."""
    datasets, path = _import_datasets(), os.path.expanduser(source)
    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:
        raise DataError(f"{path}: no data set that can be loaded ({_first_line(error)}); save it again") from error
    return describe_hugging_face(loaded, side, path)


def describe_parquet(source: str, side: int) -> ImageSource:
    """Return a source of a parquet file, or those of a folder, with a column of images as ``to_parquet`` writes it."""
    datasets, path = _import_datasets(), Path(source).expanduser()
    files = sorted(map(str, path.iterdir())) if path.is_dir() else [str(path)]
    files = [file for file in files if file.lower().endswith(".parquet") and not Path(file).name.startswith(".")]
    try:
        loaded = datasets.Dataset.from_parquet(files)
    except Exception as error:
        which, reason = next(_find_damaged(files), (source, _first_line(error)))
        raise DataError(f"{which} cannot be read as parquet ({reason}); write it again") from error
    return describe_hugging_face(loaded, side, source)


def _find_damaged(files: list[str]) -> Iterator[tuple[str, str]]:
    """Yield files that are no parquet, and why."""
    from pyarrow import parquet

    for file in files:
        try:
            parquet.read_metadata(file)
        except Exception as error:
            yield file, _first_line(error)


def describe_hugging_face(dataset: Any, side: int, description: str | None = None) -> ImageSource:
    """Return a source of a ``datasets.Dataset``: its first column of images, each read from its path or its bytes."""
    datasets = _import_datasets()
    name = description or type(dataset).__name__
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = list(dataset)
        if len(splits) > 1:
            how = f"data[{splits[0]!r}]" if description is None else os.path.join(name, splits[0])
            how = f"{name}:{splits[0]}" if name.startswith(HUB) else how
            raise DataError(f"{name} has the splits {', '.join(splits)}; give one of them: {how}")
        dataset = dataset[splits[0]]
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"{name} is a {type(dataset).__name__}, which has no length; load it with streaming=False")
    if len(dataset) == 0:
        raise DataError(f"the data set {name} is empty; expected at least one image")
    column = _find_image_column(dataset)
    labels, class_names = _read_labels(dataset)
    stored = dataset.with_format(None).select_columns([column])
    stored = stored.cast_column(column, datasets.Image(decode=False))
    # The fingerprint covers the notes of a data set, not the content of its files.
    states = [str(read_state(file["filename"])) for file in dataset.cache_files]
    first = stored[0][column]

    def read(index: int) -> Image.Image:
        try:
            value = stored[index][column]
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
        if value is None:
            raise UnreadableImageError("there is no image in this row")
        if value.get("bytes") is not None:
            return decode_bytes(value["bytes"], side)
        return decode_file(str(value.get("path")), side)

    return ImageSource(
        content=read,
        names=[str(index) for index in range(len(dataset))],
        labels=labels,
        class_names=class_names,
        digest=compute_digest(["hugging face", stored._fingerprint, column, str(len(dataset)), *states]),
        description=name,
        workers=WORKERS,
        # Files that a data set points at may change without its fingerprint.
        exact=isinstance(first, dict) and first.get("bytes") is not None,
    )


def _find_image_column(dataset: Any) -> str:
    """Return the first column of images by its type, else the first that holds the bytes of an image file."""
    from datasets import Image as ImageFeature

    for name, feature in dataset.features.items():
        if isinstance(feature, ImageFeature) or (isinstance(feature, dict) and {"bytes", "path"} <= set(feature)):
            return name
    for name, value in dataset.with_format(None)[0].items():
        if isinstance(value, bytes):
            return name
    raise DataError(
        f"no column of images: expected one of the type datasets.Image; found {', '.join(dataset.column_names)}; "
        "cast it: data.cast_column(name, datasets.Image())"
    )


def _read_labels(dataset: Any) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    from datasets import ClassLabel

    for name in LABEL_COLUMNS:
        feature = dataset.features.get(name)
        classes = feature.names if isinstance(feature, ClassLabel) else None
        if classes is None and not str(getattr(feature, "dtype", "")).startswith(("int", "uint")):
            continue
        values = dataset.with_format(None).select_columns([name])[:][name]
        # -1 is what data sets without public labels have.
        labels = [UNLABELLED if value is None or value < 0 else value for value in values]
        return np.array(labels, dtype=np.int64), classes
    return None, None


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        message = "Hugging Face data sets need the package datasets; type: pip install cdc-plugin[data]"
        raise DataError(message) from error
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

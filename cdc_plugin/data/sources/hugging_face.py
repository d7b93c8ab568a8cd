"""Describe Hugging Face data sets: objects, folders of save_to_disk, parquet files, and those of the hub by name."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.atomic import has_content
from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import UnreadableImageError, decode_bytes, decode_file
from cdc_plugin.data.sources.arrays import MOST_TIMES, UNPACKED_FREELY
from cdc_plugin.data.sources.base import UNLABELLED, WORKERS, ImageSource, number_classes, read_state
from cdc_plugin.errors import DataError

HUB = "hf:"
BATCH = 4096  # rows that are unpacked at once
LABEL_COLUMNS = ("label", "labels", "fine_label")


def describe_hub_dataset(name: str, side: int, labels: bool) -> ImageSource:
    """Return a source of ``hf:NAME`` or ``hf:NAME:SPLIT``."""
    return describe_hugging_face(load_hub_dataset(name), side, labels, name)


def load_hub_dataset(name: str) -> Any:
    """Return ``hf:NAME`` or ``hf:NAME:SPLIT`` as ``datasets.load_dataset`` fetches it."""
    title, _, split = name.removeprefix(HUB).partition(":")
    datasets = _import_datasets()
    try:
        return datasets.load_dataset(title, split=split or None, trust_remote_code=False)
    except Exception as error:  # the package, its file systems and the network raise all kinds of error
        raise DataError(
            f"{name} cannot be loaded ({_first_line(error)}); expected hf:NAME:SPLIT such as hf:ylecun/mnist:train, "
            "and the network or a data set that is in the cache of Hugging Face"
        ) from error


def describe_saved_dataset(source: str, side: int, labels: bool) -> ImageSource:
    """Return a source of a folder that ``save_to_disk`` wrote."""
    return describe_hugging_face(load_saved_dataset(source), side, labels, os.path.expanduser(source))


def load_saved_dataset(source: str) -> Any:
    """Return the data set in a folder that ``save_to_disk`` wrote."""
    datasets, path = _import_datasets(), os.path.expanduser(source)
    try:
        for folder, _, names in os.walk(path):
            endless = [name for name in names if not _has_end(os.path.join(folder, name))]
            if endless:
                raise ValueError(f"{endless[0]} is not a regular file, or empty")
        return datasets.load_from_disk(path)
    except Exception as error:
        raise DataError(f"{path}: no data set that can be loaded ({_first_line(error)}); save it again") from error


def _has_end(path: str) -> bool:
    """Return whether a file of a saved data set can be read to its end; locks beside them may be empty."""
    return has_content(path) or (not path.endswith((".json", ".arrow")) and stat.S_ISREG(os.stat(path).st_mode))


def describe_parquet(source: str, side: int, labels: bool) -> ImageSource:
    """Return a source of a parquet file, or those of a folder, with a column of images as ``to_parquet`` writes it."""
    datasets, files = _import_datasets(), _list_parquet(Path(os.path.expanduser(source)))
    _check_parquet(files)  # first, since datasets logs much and says little
    try:
        loaded = datasets.Dataset.from_parquet(files)
    except Exception as error:
        raise DataError(f"{source} cannot be read as parquet ({_first_line(error)}); write it again") from error
    return describe_hugging_face(loaded, side, labels, source)


def open_parquet(path: Path) -> tuple[Any, int, Callable[[str], Iterator[Any]]]:
    """Return schema and number of rows of a parquet file, or those of a folder, and a reader of a column in parts."""
    _import_datasets()  # which brings pyarrow
    from pyarrow import parquet

    files = _list_parquet(path)
    rows = _check_parquet(files)

    def read(column: str) -> Iterator[Any]:
        for file in files:
            try:
                for batch in parquet.ParquetFile(file).iter_batches(BATCH, columns=[column]):
                    yield batch.column(0)
            except (OSError, KeyError, ValueError) as error:
                raise DataError(f"{file} cannot be read as parquet ({_first_line(error)}); write it again") from error

    return parquet.read_schema(files[0]), rows, read


def _list_parquet(path: Path) -> list[str]:
    files = sorted(map(str, path.iterdir())) if path.is_dir() else [str(path)]
    return [file for file in files if file.lower().endswith(".parquet") and not Path(file).name.startswith(".")]


def _check_parquet(files: list[str]) -> int:
    """Return the number of rows; refuse files that are no parquet or unpack to an absurd size, or hold no row."""
    from pyarrow import parquet

    rows = 0
    for file in files:
        try:
            if not has_content(file):  # a pipe would never end
                raise ValueError("it is no regular file with content")
            facts = parquet.read_metadata(file)
            unpacked = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
            if unpacked > max(UNPACKED_FREELY, MOST_TIMES * os.path.getsize(file)):
                raise ValueError(f"it unpacks to more than {MOST_TIMES} times its size")
        except Exception as error:
            raise DataError(f"{file} cannot be read as parquet ({_first_line(error)}); write it again") from error
        rows += facts.num_rows
    if rows == 0:
        raise DataError(f"{files[0]} holds no rows; expected at least one")
    return rows


def describe_hugging_face(dataset: Any, side: int, labels: bool = True, description: str | None = None) -> ImageSource:
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
    known, class_names = _read_labels(dataset) if labels else (None, None)
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
        labels=known,
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
        kind = str(getattr(feature, "dtype", ""))
        if classes is None and not kind.startswith(("int", "uint", "string", "large_string")):
            continue
        values = dataset.with_format(None).select_columns([name])[:][name]
        if "string" in kind:
            numbers, classes = number_classes(value or "" for value in values)
            return np.where([value is None for value in values], UNLABELLED, numbers), classes
        # -1 is what data sets without public labels have.
        labels = [UNLABELLED if value is None or not 0 <= value < -UNLABELLED else value for value in values]
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

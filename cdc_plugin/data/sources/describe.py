"""Finds out what kind of source the user named: a data set, a folder, files, shards, arrays or Python objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cdc_plugin.data.resize import SMALL_SIDE
from cdc_plugin.data.sources.arrays import array_file_source, array_source, as_pixels, image_shape_of_file
from cdc_plugin.data.sources.base import ImageSource, UnreadableImageError, spread
from cdc_plugin.data.sources.folder import (
    ACCEPTED,
    files_source,
    folder_source,
    is_image_name,
    list_images,
    uniform_side,
)
from cdc_plugin.data.sources.hugging_face import (
    HUB,
    hub_source,
    hugging_face_source,
    is_hugging_face,
    is_saved_dataset,
    parquet_files,
    parquet_source,
    saved_source,
)
from cdc_plugin.data.sources.named import data_root, datasets
from cdc_plugin.data.sources.objects import dataset_source, image_list_source, is_dataset, item_size
from cdc_plugin.data.sources.shards import shard_files, shards_source
from cdc_plugin.errors import UserError

LOOKS = 16
PATHS = (
    "a folder of images, a .npz, .npy or .parquet file, tar shards ('shards/*.tar', 'part-{000..009}.tar'), "
    "a folder that datasets' save_to_disk wrote, hf:NAME:SPLIT"
)


def describe_source(source: Any, side: int, root: str | os.PathLike[str] | None) -> ImageSource:
    """What the source holds, without reading more than it takes."""
    if isinstance(source, ImageSource):
        return source
    if isinstance(source, str) and source in datasets:
        return datasets.get(source).load(data_root(root), side)
    if isinstance(source, str | os.PathLike):
        return _describe_path(os.fspath(source), side)
    if isinstance(source, np.ndarray | torch.Tensor):
        return array_source(source)
    if isinstance(source, list | tuple) and source:
        if all(isinstance(entry, str | os.PathLike) for entry in source):
            return files_source(source, side, f"{len(source)} files")
        if all(isinstance(entry, Image.Image) for entry in source):
            return image_list_source(source)
    if is_hugging_face(source):
        return hugging_face_source(source, side)
    if is_dataset(source) and not isinstance(source, dict):
        return dataset_source(source)
    raise UserError(
        f"expected {PATHS}, the name of a data set, an array or tensor, a list of paths or images, or a data set "
        f"with __len__ and __getitem__; found {type(source).__name__}"
    )


def native_size(source: Any) -> int | None:
    """Side of the images if they are squares of one size, as far as a cheap look can tell; else None."""
    if isinstance(source, str) and source in datasets:
        return datasets.get(source).native_size
    if isinstance(source, ImageSource):
        return None if callable(source.content) else _side(source.content.shape[1:3])
    if isinstance(source, str | os.PathLike):
        return _native_size_of_path(os.fspath(source))
    if isinstance(source, np.ndarray | torch.Tensor):
        return _side(as_pixels(source[:1], "array").shape[1:3])
    if isinstance(source, list | tuple) and source and all(isinstance(entry, str | Path) for entry in source):
        return uniform_side(source)
    if is_hugging_face(source):
        return _looked_at(hugging_face_source(source, SMALL_SIDE))
    if is_dataset(source) and len(source) > 0:
        first, last = item_size(source[0]), item_size(source[len(source) - 1])
        return _side(first) if first == last else None
    return None


def has_files(source: str | os.PathLike[str]) -> bool:
    """Whether images have files of their own: not those of arrays, shards, tables and data sets known by name."""
    text, path = os.fspath(source), Path(source).expanduser()
    # A name of a data set goes before a folder of that name.
    known = isinstance(source, str) and source in datasets
    if known or text.startswith(HUB) or path.suffix.lower() in (".npz", ".npy"):
        return False
    return shard_files(text) is None and not is_saved_dataset(path) and parquet_files(path) is None


def _describe_path(source: str, side: int) -> ImageSource:
    packed = _packed(source, side)
    if packed is not None:
        return packed
    path = Path(source).expanduser()
    if path.is_dir():
        return folder_source(path, side)
    if not path.exists():
        raise UserError(
            f"nothing at {source}; expected {PATHS}, or one of the data sets {', '.join(datasets.names())}; "
            "check the path"
        )
    if path.suffix.lower() in (".npz", ".npy"):
        return array_file_source(path)
    if is_image_name(path.name):
        return files_source([path], side, str(path), [path.name])
    raise UserError(
        f"{path} is of no known kind: expected {PATHS}, or an image ({ACCEPTED}); unpack archives that are no shards"
    )


def _packed(source: str, side: int) -> ImageSource | None:
    """Images that lie in larger files; None for any other path."""
    if source.startswith(HUB):
        return hub_source(source, side)
    shards = shard_files(source)
    if shards is not None:
        return shards_source(shards, side, source)
    path = Path(source).expanduser()
    if is_saved_dataset(path):
        return saved_source(path, side)
    tables = parquet_files(path)
    return None if tables is None else parquet_source(tables, side, source)


def _native_size_of_path(source: str) -> int | None:
    packed = _packed(source, SMALL_SIDE)
    if packed is not None:
        return _looked_at(packed)
    path = Path(source).expanduser()
    if path.is_dir():
        return uniform_side(list_images(path), folder=str(path))
    if path.suffix.lower() in (".npz", ".npy"):
        return _side(image_shape_of_file(path))
    return uniform_side([path])


def _looked_at(source: ImageSource) -> int | None:
    """The side, if a few images are squares of one size; JPEGs may be seen smaller, but not as small ones."""
    assert callable(source.content)
    sizes = set()
    for place in spread(len(source), LOOKS):
        try:
            sizes.add(source.content(place).size)
        except UnreadableImageError:
            continue
    return _side(sizes.pop()) if len(sizes) == 1 else None


def _side(size: tuple[int, ...]) -> int | None:
    return size[0] if size[0] == size[1] else None

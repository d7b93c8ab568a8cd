"""Find out what kind of source the user named: a data set, a folder, files, shards, arrays or Python objects."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from cdc_plugin.data.atomic import has_content
from cdc_plugin.data.decode import UnreadableImageError
from cdc_plugin.data.sources.arrays import describe_array, describe_array_file, read_image_size, to_pixels
from cdc_plugin.data.sources.base import ACCEPTED, HINTS, ImageSource, is_image_name, spread_evenly
from cdc_plugin.data.sources.folder import describe_files, describe_folder, find_uniform_side, list_images
from cdc_plugin.data.sources.hugging_face import (
    HUB,
    describe_hub_dataset,
    describe_hugging_face,
    describe_parquet,
    describe_saved_dataset,
)
from cdc_plugin.data.sources.named import datasets, find_data_root
from cdc_plugin.data.sources.objects import describe_dataset, is_dataset, read_item_size
from cdc_plugin.data.sources.shards import COMPRESSED, describe_shards
from cdc_plugin.data.views import SMALL_SIDE
from cdc_plugin.errors import DataError

ARRAY_FILES = (".npz", ".npy")
LOOKS = 16
PATHS = (
    "a folder of images, a .npz, .npy or .parquet file, tar shards ('shards/*.tar', 'part-{000..009}.tar'), "
    "a folder that datasets' save_to_disk wrote, hf:NAME:SPLIT"
)
SAVED = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})  # files that save_to_disk writes

Kind = Literal["array", "named", "hub", "shards", "saved", "parquet", "folder", "image"]

# Images that lie in larger files: from path, side and whether labels are wanted to the source.
PACKED: dict[Kind | None, Callable[[str, int, bool], ImageSource]] = {
    "hub": describe_hub_dataset,
    "shards": describe_shards,
    "saved": describe_saved_dataset,
    "parquet": describe_parquet,
}


def describe_source(source: Any, side: int, root: str | os.PathLike[str] | None, labels: bool = True) -> ImageSource:
    """Return what is known of a source of any kind, without reading more than that takes; labels only where wanted."""
    if isinstance(source, ImageSource):
        return source
    if isinstance(source, str | os.PathLike):
        return _describe_path(source, side, root, labels)
    if isinstance(source, np.ndarray | torch.Tensor):
        return describe_array(source)
    if isinstance(source, list | tuple) and source:
        if all(isinstance(entry, str | os.PathLike) for entry in source):
            return describe_files(source, side, f"{len(source)} files")
        if all(isinstance(entry, Image.Image) for entry in source):
            return describe_dataset(source, f"{len(source)} images", labels)
    if _is_hugging_face(source):
        return describe_hugging_face(source, side, labels)
    if is_dataset(source) and not isinstance(source, dict):
        return describe_dataset(source, type(source).__name__, labels)
    raise DataError(
        f"expected {PATHS}, the name of a data set, an array or tensor, a list of paths or images, or a data set "
        f"with __len__ and __getitem__; found {type(source).__name__}"
    )


def native_size(source: Any) -> int | None:
    """Return the side of the images if they are squares of one size, as far as a cheap look can tell; else None.

    >>> native_size(np.zeros((5, 8, 8, 3), np.uint8))
    8
    """
    if isinstance(source, ImageSource):
        return None if callable(source.content) else _check_square(source.content.shape[1:3])
    if isinstance(source, str | os.PathLike):
        return _native_size_of_path(source)
    if isinstance(source, np.ndarray | torch.Tensor):
        return _check_square(to_pixels(source[:1], "array").shape[1:3])
    if isinstance(source, list | tuple) and source and all(isinstance(entry, str | Path) for entry in source):
        return find_uniform_side(source)
    if _is_hugging_face(source):
        return _look_at_images(describe_hugging_face(source, SMALL_SIDE, False))
    if is_dataset(source) and len(source) > 0:
        first, last = read_item_size(source[0]), read_item_size(source[len(source) - 1])
        return _check_square(first) if first == last else None
    return None


def has_files(source: str | os.PathLike[str]) -> bool:
    """Return whether images have files of their own, unlike those of arrays, shards, tables and named data sets."""
    is_array = Path(source).suffix.lower() in ARRAY_FILES  # whether it exists or not
    return not is_array and find_kind(source) in ("folder", "image", None)


def find_kind(source: str | os.PathLike[str]) -> Kind | None:
    """Return which kind of source a path or a name is; None for a path that is absent or of no known kind.

    >>> find_kind("digits"), find_kind("hf:ylecun/mnist:train"), find_kind("shards/{000..009}.tar")
    ('named', 'hub', 'shards')
    """
    text, path = os.fspath(source), Path(os.path.expanduser(source))
    if path.suffix.lower() in ARRAY_FILES and has_content(path):
        return "array"
    if isinstance(source, str) and source in datasets:  # before a folder of that name
        return "named"
    if text.startswith(HUB):
        return "hub"
    if path.is_dir():
        return _find_kind_of_folder(path)
    name = text.lower()
    if name.endswith(".tar") or (name.endswith(COMPRESSED) and (path.is_file() or "{" in name or "*" in name)):
        return "shards"
    if not has_content(path):
        return None
    if path.suffix.lower() == ".parquet":
        return "parquet"
    return "image" if is_image_name(path.name) else None


def _find_kind_of_folder(path: Path) -> Kind:
    """Return what a folder holds at its top: shards or tables alone, a saved data set, else images."""
    try:
        with os.scandir(path) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return "folder"
    names = {entry.name for entry in shown}
    if any(saved <= names for saved in SAVED):
        return "saved"
    if not any(is_image_name(name) for name in names):
        if any(name.lower().endswith(".tar") for name in names) and not any(entry.is_dir() for entry in shown):
            return "shards"
        if any(name.lower().endswith(".parquet") for name in names):
            return "parquet"
    return "folder"


def _describe_path(
    source: str | os.PathLike[str], side: int, root: str | os.PathLike[str] | None, labels: bool
) -> ImageSource:
    kind, text, path = find_kind(source), os.fspath(source), Path(os.path.expanduser(source))
    if kind == "array":
        return describe_array_file(path, labels)
    if kind == "named":
        return datasets.get(text).load(find_data_root(root), side)
    if kind == "folder":
        return describe_folder(path, side)
    if kind == "image":
        return describe_files([path], side, str(path), [path.name])
    if kind in PACKED:
        return PACKED[kind](text, side, labels)
    if not path.exists():
        raise DataError(
            f"nothing at {source}; expected {PATHS}, or one of the data sets {', '.join(datasets.names())}; "
            "check the path"
        )
    known = path.suffix.lower() in (*ARRAY_FILES, ".parquet") or is_image_name(path.name)
    if known and path.is_file():
        raise DataError(f"{path} is empty (0 bytes); copy or download it again")
    fitting = (hint for kinds, hint in HINTS.items() if path.suffix.lower() in kinds)
    hint = next(fitting, "unpack archives that are no shards")
    raise DataError(f"{path} is of no known kind: expected {PATHS}, or an image ({ACCEPTED}); {hint}")


def _native_size_of_path(source: str | os.PathLike[str]) -> int | None:
    kind, text, path = find_kind(source), os.fspath(source), Path(os.path.expanduser(source))
    if kind == "named":
        return datasets.get(text).native_size
    if kind == "array":
        return _check_square(read_image_size(path))
    if kind == "folder":
        return find_uniform_side(list_images(path), folder=str(path))
    return _look_at_images(PACKED[kind](text, SMALL_SIDE, False)) if kind in PACKED else find_uniform_side([path])


def _look_at_images(source: ImageSource) -> int | None:
    """Return the side, if a few images are squares of one size; JPEGs may be seen smaller, but not as small ones."""
    sizes = set()
    for place in spread_evenly(len(source), LOOKS):
        with contextlib.suppress(UnreadableImageError):
            sizes.add(source.read(place).size)
    return _check_square(sizes.pop()) if len(sizes) == 1 else None


def _check_square(size: tuple[int, ...]) -> int | None:
    return size[0] if size[0] == size[1] else None


def _is_hugging_face(source: object) -> bool:
    """Return whether this is an object of the package ``datasets``, of whatever kind."""
    return "datasets" in sys.modules and type(source).__module__.split(".")[0] == "datasets"

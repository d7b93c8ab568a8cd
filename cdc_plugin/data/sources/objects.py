"""Describe images held by Python objects: a map-style torch data set, or a list of PIL images."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import UnreadableImageError, to_rgb
from cdc_plugin.data.sources.arrays import to_pixels
from cdc_plugin.data.sources.base import UNLABELLED, ImageSource, spread_evenly
from cdc_plugin.errors import DataError


def is_dataset(source: object) -> bool:
    """Return whether an object has a length and items by number, as map-style data sets have."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def describe_dataset(dataset: Any, name: str, labels: bool = True) -> ImageSource:
    """Return a source of a map-style data set, or of a list of PIL images.

    It yields an image, or a tuple that starts with an image and an integer label. It is read by one thread, in order:
    nothing says that ``__getitem__`` may run twice at once.
    """
    if len(dataset) == 0:
        raise DataError(f"the data set {name} is empty; expected at least one image")
    known = np.full(len(dataset), UNLABELLED, dtype=np.int64) if labels else None

    def read(index: int) -> Image.Image:
        try:
            item = dataset[index]
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
        image, label = _split_item(item)
        if known is not None and label is not None:
            known[index] = label
        return _to_image(image, f"item {index} of {name}")

    classes = getattr(dataset, "classes", None)
    named = isinstance(classes, list | tuple) and all(isinstance(entry, str) for entry in classes)
    return ImageSource(
        content=read,
        names=[str(index) for index in range(len(dataset))],
        labels=known,
        class_names=list(classes) if named and classes else None,
        digest=_digest_sample(dataset, name),  # differs every time if transforms are random
        description=name,
        exact=False,
    )


def read_item_size(item: Any) -> tuple[int, int]:
    """Return width and height of an item of a data set."""
    return _to_image(_split_item(item)[0], "the first item").size


def _split_item(item: Any) -> tuple[Any, int | None]:
    """Split what a data set yields into image and label."""
    if not isinstance(item, tuple | list):
        return item, None
    label = item[1] if len(item) > 1 else None
    if isinstance(label, torch.Tensor | np.ndarray) and label.ndim == 0:
        label = label.item()
    if isinstance(label, bool | np.bool_ | int | np.integer) and abs(int(label)) < -UNLABELLED:
        return item[0], int(label)
    return item[0], None


def _to_image(image: Any, description: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise DataError(
            f"{description}: expected a PIL image, an array or a tensor; found {type(image).__name__}; "
            "let the data set yield the image first"
        )
    return Image.fromarray(to_pixels(image[None], description)[0])


def _digest_sample(items: Any, name: str) -> str:
    parts: list[str | bytes] = [name, str(len(items))]
    for index in spread_evenly(len(items), 32):
        try:
            parts.append(_to_image(_split_item(items[index])[0], f"item {index} of {name}").tobytes())
        except OSError:
            parts.append("unreadable")
    return compute_digest(parts)

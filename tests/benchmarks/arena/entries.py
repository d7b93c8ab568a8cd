"""List what is run: real sets, variants of them, and for each of them backbones of several qualities."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from cdc_plugin.config.recipes import DEMO_BACKBONE

Array = np.ndarray


@dataclass(frozen=True)
class Entry:
    """One row of the arena: a set of images, and the backbone that is refined on it."""

    source: str  # the images are left out together: they are no independent witnesses
    data: str  # name of the set, see `DATA`
    backbone: str  # epochs of cdc-pretrain, or a file or folder, below shared/ or the package's own
    quality: str  # full, half, barely, demo or imagenet
    settings: dict[str, object] = field(default_factory=dict)
    small: bool = False  # part of the small arena

    @property
    def name(self) -> str:
        kind = (
            "embedding" if "frozen_views" in self.settings else "frozen" if "freeze_backbone" in self.settings else None
        )
        return "-".join(filter(None, [self.data, self.quality, kind]))


def read_folder(folder: Path, size: int) -> tuple[Array, Array]:
    """Read class sub-folders of photos as squares."""
    images, labels = [], []
    for label, kind in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for path in sorted(kind.iterdir()):
            with Image.open(path) as photo:
                side = min(photo.size)
                left, top = (photo.width - side) // 2, (photo.height - side) // 2
                square = photo.convert("RGB").crop((left, top, left + side, top + side))
                images.append(np.asarray(square.resize((size, size), Image.Resampling.BICUBIC)))
                labels.append(label)
    return np.stack(images), np.array(labels)


def read_array(path: Path) -> tuple[Array, Array]:
    with np.load(path) as archive:
        images, labels = archive["x"], archive["y"]
    return (np.repeat(images[..., None], 3, axis=-1) if images.ndim == 3 else images), labels


def add_noise(images: Array, labels: Array) -> tuple[Array, Array]:
    """Add noise of a standard deviation of 40 grey levels."""
    noise = np.random.default_rng(0).normal(0, 40, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8), labels


def unbalance(images: Array, labels: Array) -> tuple[Array, Array]:
    """Keep from a quarter of the first class up to all of the last."""
    randomness, classes = np.random.default_rng(0), labels.max() + 1
    kept = randomness.random(len(labels)) < 0.25 + 0.75 * labels / (classes - 1)
    return images[kept], labels[kept]


def halve(images: Array, labels: Array) -> tuple[Array, Array]:
    """Keep every second class."""
    kept = labels % 2 == 0
    return images[kept], labels[kept] // 2


# Name: file or folder below shared/data, size of photos, change.
DATA: dict[str, tuple[str, int | None, Callable[[Array, Array], tuple[Array, Array]] | None]] = {
    "digits": ("digits.npz", None, None),
    "fashion5k": ("fashion5k.npz", None, None),
    "cifar10_5k": ("cifar10_5k.npz", None, None),
    "mnist5k": ("mnist5k.npz", None, None),
    "usps5k": ("usps5k.npz", None, None),
    "gtsrb10": ("gtsrb10.npz", None, None),
    "scenes32": ("scenes_900", 32, None),
    "imagenette32": ("imagenette_1000", 32, None),
    "scenes64": ("scenes_900", 64, None),
    "imagenette64": ("imagenette_1000", 64, None),
    "scenes96": ("scenes_900", 96, None),
    "imagenette96": ("imagenette_1000", 96, None),
    "mnist5k_noise": ("mnist5k.npz", None, add_noise),
    "usps5k_unbalanced": ("usps5k.npz", None, unbalance),
    "fashion5k_half": ("fashion5k.npz", None, halve),
}
DIGITS = {"mean": [0.3092] * 3, "std": [0.3488] * 3}
FASHION = {"mean": [0.2851] * 3, "std": [0.3375] * 3}
PHOTOS = {"arch": "tf_efficientnet_lite0", "mean": [0.5] * 3, "std": [0.5] * 3, "input_size": 96}
FROZEN = {"freeze_backbone": True}
LITE = "weights/tf_efficientnet_lite0_imagenet_timm.pth"
OTHER_KINDS = (
    *(("digits", "digits"), ("fashion", "fashion5k"), ("mnist", "mnist5k"), ("usps", "usps5k"), ("gtsrb", "gtsrb10")),
    *(("cifar", "cifar10_5k"), ("scenes", "scenes64"), ("imagenette", "imagenette64")),
)
EMBEDDINGS = ("digits", "fashion5k", "mnist5k", "usps5k", "gtsrb10")
TRAINED = (
    Entry("digits", "digits", "backbones/digits_resnet18w16.pt", "full", DIGITS, small=True),
    Entry("digits", "digits", str(DEMO_BACKBONE), "demo"),
    Entry("digits", "digits", "15", "half"),
    Entry("fashion", "fashion5k", "backbones/fashion5k_resnet18w16.pt", "full", FASHION),
    Entry("fashion", "fashion5k", "8", "half"),
    Entry("fashion", "fashion5k_half", "backbones/fashion5k_resnet18w16.pt", "full", FASHION),
    Entry("mnist", "mnist5k", "backbones/mnist5k", "full", small=True),
    Entry("mnist", "mnist5k", "10", "half"),
    Entry("mnist", "mnist5k_noise", "25", "full"),
    Entry("usps", "usps5k", "backbones/usps5k", "full", small=True),
    Entry("usps", "usps5k", "6", "half"),
    Entry("usps", "usps5k", "2", "barely"),
    Entry("usps", "usps5k_unbalanced", "backbones/usps5k", "full"),
    Entry("gtsrb", "gtsrb10", "backbones/gtsrb10", "full", small=True),
    Entry("gtsrb", "gtsrb10", "12", "half"),
    Entry("cifar", "cifar10_5k", "40", "full"),
    Entry("cifar", "cifar10_5k", "8", "half"),
    Entry("scenes", "scenes32", "120", "full"),
    Entry("imagenette", "imagenette32", "120", "full"),
    Entry("scenes", "scenes96", LITE, "imagenet", PHOTOS),
    Entry("imagenette", "imagenette96", LITE, "imagenet", PHOTOS),
)
# The same networks on images of other kinds, too, whose features are taken for embeddings: no view is made.
EMBEDDED = (
    *(Entry(source, data, LITE, "imagenet", PHOTOS | {"input_size": 64}) for source, data in OTHER_KINDS),
    *(entry for entry in TRAINED if entry.quality == "imagenet"),
    *(entry for entry in TRAINED if entry.quality == "full" and entry.data in EMBEDDINGS),
)
# Each of them with a frozen backbone as well: has training helped?
ENTRIES = (
    *TRAINED,
    *(dataclasses.replace(e, settings=e.settings | FROZEN, small=False) for e in TRAINED),
    *(dataclasses.replace(e, settings=e.settings | FROZEN | {"frozen_views": 0}, small=False) for e in EMBEDDED),
)


def write_data(name: str, shared: Path, folder: Path) -> Path:
    """Write a set as an .npz file unless it is there, and return its path."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        file, size, change = DATA[name]
        source = shared / "data" / file
        images, labels = read_array(source) if size is None else read_folder(source, size)
        if change is not None:
            images, labels = change(images, labels)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=images, y=labels)
    return path

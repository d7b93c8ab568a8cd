"""Load data sets by name: those of the paper, and the handwritten digits that come with the package.

Nothing is downloaded here. Files are looked for below ``root``, else the folder that the environment variable
CDC_DATA names, else ``data`` in the working directory.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.core.registry import Registry
from cdc_plugin.data.sources.arrays import describe_array
from cdc_plugin.data.sources.base import ImageSource, number_classes
from cdc_plugin.data.sources.folder import describe_files, describe_folder, list_images
from cdc_plugin.errors import DataError

PACKAGED = Path(__file__).parent

# The 20 superclasses of CIFAR-100 in their official order, each with its five fine classes.
SUPERCLASSES = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}


@dataclass(frozen=True)
class NamedDataset:
    """A data set that can be asked for by name."""

    load: Callable[[Path, int], ImageSource]  # from the data folder and the side that images are kept at
    native_size: int | None = None  # side of the images if all have one


def find_data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder that named data sets are looked for in."""
    return Path(os.path.expanduser(root if root is not None else os.environ.get("CDC_DATA", "data")))


def find_coarse_labels(fine: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the superclasses (N,) of CIFAR-100 labels, which are numbered alphabetically by fine class."""
    superclass = {name: number for number, names in enumerate(SUPERCLASSES.values()) for name in names.split()}
    return np.array([superclass[name] for name in sorted(superclass)], dtype=np.int64)[fine]


def read_class_list(name: str) -> list[str]:
    """Return the WordNet numbers of an ImageNet subset: imagenet10, imagenetdogs (DAC), imagenet50, 100, 200 (SCAN)."""
    return (PACKAGED / "class_lists" / f"{name}.txt").read_text(encoding="ascii").split()


def load_digits(root: Path, side: int) -> ImageSource:
    """Load 1,797 handwritten digits at 32 x 32.

    "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
    CC BY 4.0: its test part, stored as published with 8 x 8 pixels from 0 to 16.
    """
    with np.load(PACKAGED / "digits.npz", allow_pickle=False) as archive:
        small, labels = archive["images"], archive["labels"]
    gray = np.rint(small * (255 / 16)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(digit).resize((32, 32), Image.Resampling.BICUBIC)) for digit in gray]
    return describe_array(np.stack(large), labels, "digits", [str(digit) for digit in range(10)])


def load_cifar(classes: int, root: Path, side: int) -> ImageSource:
    """Load CIFAR-10 or CIFAR-100, or the latter with its 20 superclasses: 60,000 training and test images, 32 x 32."""
    kind, folder = ("CIFAR10", "cifar-10-batches-py") if classes == 10 else ("CIFAR100", "cifar-100-python")
    parts = [_load_torchvision(kind, root, folder, train=train) for train in (True, False)]
    images = np.concatenate([part.data for part in parts])
    labels, class_names = np.concatenate([part.targets for part in parts]), list(parts[0].classes)
    if classes == 20:
        labels, class_names = find_coarse_labels(labels), list(SUPERCLASSES)
    return describe_array(images, labels, f"cifar{classes}", class_names)


def load_stl10(root: Path, side: int, unlabelled: bool = False) -> ImageSource:
    """Load STL-10, training and test images together: 13,000 of 96 x 96, with the unlabelled part 113,000."""
    splits = ("train", "test", "unlabeled") if unlabelled else ("train", "test")
    parts = [_load_torchvision("STL10", root, "stl10_binary", split=split) for split in splits]
    images = _join_channels_last([part.data for part in parts])
    if unlabelled:
        return describe_array(images, description="stl10-all")
    labels = np.concatenate([part.labels for part in parts])
    return describe_array(images, labels, "stl10", list(parts[0].classes))


def load_svhn(root: Path, side: int) -> ImageSource:
    """Load the test part of SVHN: 26,032 house numbers, 32 x 32."""
    part = _load_torchvision("SVHN", root, "test_32x32.mat", split="test")
    return describe_array(_join_channels_last([part.data]), part.labels, "svhn", [str(digit) for digit in range(10)])


def load_dtd(root: Path, side: int) -> ImageSource:
    """Load the Describable Textures Dataset (DTD), all three parts together: 5,640 images of 47 kinds."""
    _load_torchvision("DTD", root, "dtd")  # refuses if it is absent; its parts share one folder of images
    return replace(describe_folder(root / "dtd" / "dtd" / "images", side), description="dtd")


def load_places365(root: Path, side: int) -> ImageSource:
    """Load the validation images of Places365 in their small version: 36,500 scenes, 256 x 256."""
    part = _load_torchvision("Places365", root, "val_256", split="val", small=True)
    if not (root / "val_256").is_dir():  # torchvision looks at its lists only
        raise DataError(f"Places365 has lists in {root}, but no images in {root / 'val_256'}; unpack val_256.tar there")
    paths, labels = zip(*part.imgs, strict=True)
    names = [Path(path).name for path in paths]
    return describe_files(paths, side, "places365", names, np.array(labels, dtype=np.int64), list(part.classes))


def load_tinyimagenet(root: Path, side: int) -> ImageSource:
    """Load Tiny-ImageNet, the training images: 200 classes of 500, 64 x 64."""
    candidates = [root / "tiny-imagenet-200" / "train", root / "train", root]
    folder = next((path for path in candidates if any(path.glob("n[0-9]*/images"))), None)
    if folder is None:
        raise DataError(
            f"Tiny-ImageNet is not in {candidates[0]}; unpack tiny-imagenet-200.zip (cs231n.stanford.edu) "
            f"into {root}, or name another folder with the data root or CDC_DATA"
        )
    return replace(describe_folder(folder, side), description="tinyimagenet")


def load_imagenet_subset(name: str, root: Path, side: int) -> ImageSource:
    """Load the training images of some ImageNet classes, from a folder with one sub-folder per WordNet number."""
    wanted = read_class_list(name)
    candidates = [root / place for place in (f"{name}/train", name, "imagenet/train", "imagenet", "train", ".")]
    present = [folder for folder in candidates if folder.is_dir()] or [root]
    absent = {folder: [wnid for wnid in wanted if not (folder / wnid).is_dir()] for folder in present}
    folder = min(absent, key=lambda place: len(absent[place]))
    missing = absent[folder]
    if missing:
        raise DataError(
            f"{name} needs the ImageNet class folders {' '.join(wanted[:3])} ... in {root}, its sub-folder "
            f"train or imagenet/train; in {folder} {len(wanted) - len(missing)} of {len(wanted)} are there, missing: "
            f"{' '.join(missing)}; unpack ILSVRC2012_img_train.tar by class and name that folder with the data root or "
            "CDC_DATA"
        )
    names = [f"{wnid}/{image}" for wnid in wanted for image in list_images(folder / wnid)]
    labels, class_names = number_classes([image.split("/", 1)[0] for image in names])
    return describe_files([folder / image for image in names], side, name, names, labels, class_names)


def _load_torchvision(kind: str, root: Path, folder: str, **part: Any) -> Any:
    """Load one part of a torchvision data set that lies on disk."""
    from torchvision import datasets as torchvision_datasets

    try:
        return getattr(torchvision_datasets, kind)(str(root), download=False, **part)
    except (RuntimeError, OSError) as error:
        words = "".join(f"{key}={value!r}, " for key, value in part.items())
        raise DataError(
            f"{kind} is not, or not complete, in {root / folder} ({error}); fetch it with: python -c "
            f'"import torchvision; torchvision.datasets.{kind}({str(root)!r}, {words}download=True)", '
            "or name the folder that holds it with the data root or CDC_DATA"
        ) from error


def _join_channels_last(parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return arrays (n, 3, S, S) as one of (N, S, S, 3), with no third copy of what may be gigabytes."""
    side = parts[0].shape[2]
    joined = np.empty((sum(map(len, parts)), side, side, 3), np.uint8)
    return np.concatenate([part.transpose(0, 2, 3, 1) for part in parts], out=joined)


IMAGENET_SUBSETS = ("imagenet10", "imagenetdogs", "imagenet50", "imagenet100", "imagenet200")

datasets: Registry[NamedDataset] = Registry(
    "data set",
    {
        "digits": NamedDataset(load_digits, 32),
        "cifar10": NamedDataset(partial(load_cifar, 10), 32),
        "cifar100": NamedDataset(partial(load_cifar, 100), 32),
        "cifar20": NamedDataset(partial(load_cifar, 20), 32),
        "stl10": NamedDataset(load_stl10, 96),
        "stl10-all": NamedDataset(partial(load_stl10, unlabelled=True), 96),
        "tinyimagenet": NamedDataset(load_tinyimagenet, 64),
        "svhn": NamedDataset(load_svhn, 32),
        "dtd": NamedDataset(load_dtd),
        "places365": NamedDataset(load_places365, 256),
        **{name: NamedDataset(partial(load_imagenet_subset, name)) for name in IMAGENET_SUBSETS},
    },
)

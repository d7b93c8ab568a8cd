import re
from types import SimpleNamespace

import numpy as np
import pytest
import torchvision
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits

from cdc_plugin.data import datasets, native_size, open_images
from cdc_plugin.data.sources.named import SUPERCLASSES, find_coarse_labels, find_data_root, read_class_list
from cdc_plugin.errors import UserError

# Superclass of the 100 fine classes in alphabetical order, as the CIFAR-100 files number them.
OFFICIAL = [
    *[4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7],
    *[6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10],
    *[16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16],
    *[12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13],
]


def test_digits_come_with_the_package_and_equal_those_of_scikit_learn():
    images = open_images("digits")
    oracle = load_digits()
    assert images.images.shape == (1797, 32, 32, 3)
    assert images.labels.tolist() == oracle.target.tolist()
    assert images.class_names == [str(digit) for digit in range(10)]
    for index in (0, 500, 1796):
        small = Image.fromarray(np.rint(oracle.images[index] * 255 / 16).astype(np.uint8))
        expected = np.asarray(small.resize((32, 32), Image.Resampling.BICUBIC))
        assert (images.images[index] == expected[..., None]).all()


def test_superclasses_are_twenty_times_five_and_numbered_officially():
    assert [len(names.split()) for names in SUPERCLASSES.values()] == [5] * 20
    assert find_coarse_labels(np.arange(100)).tolist() == OFFICIAL


@pytest.mark.parametrize(("name", "count"), [("10", 10), ("dogs", 15), ("50", 50), ("100", 100), ("200", 200)], ids=str)
def test_class_lists_hold_distinct_wordnet_numbers(name, count):
    classes = read_class_list(f"imagenet{name}")
    assert len(set(classes)) == len(classes) == count
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in classes)
    assert f"imagenet{name}" in datasets
    assert name not in ("50", "100") or set(classes) < set(read_class_list(f"imagenet{2 * count}"))


def fake_cifar(count, classes):
    def make(root, train, download):
        assert not download
        number = count if train else count // 2
        data, targets = np.full((number, 32, 32, 3), int(train), np.uint8), [i % classes for i in range(number)]
        return SimpleNamespace(data=data, targets=targets, classes=[f"class {index}" for index in range(classes)])

    return make


def test_cifar_is_training_and_test_part_together(monkeypatch, tmp_path):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fake_cifar(40, 10))
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", fake_cifar(200, 100))
    ten = open_images("cifar10", root=tmp_path)
    assert ten.images[:, 0, 0, 0].tolist() == [1] * 40 + [0] * 20
    assert ten.labels[:12].tolist() == [*range(10), 0, 1]
    assert len(ten.class_names) == 10
    hundred = open_images("cifar100", root=tmp_path)
    assert hundred.labels[99:102].tolist() == [99, 0, 1]
    assert len(hundred.class_names) == 100
    twenty = open_images("cifar20", root=tmp_path)
    assert twenty.labels[:100].tolist() == OFFICIAL
    assert twenty.class_names == list(SUPERCLASSES)


def test_stl10_takes_the_unlabelled_part_only_where_it_is_asked_for(monkeypatch, tmp_path):
    """The files are those of Stanford, read by torchvision's own class: column by column, labels from 1."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for name, count in (("train", 2), ("test", 3), ("unlabeled", 4)):
        pixels = np.full((count, 3, 96, 96), count, np.uint8)
        pixels[:, 1, 5, 0] = 77  # green, sixth column, first row
        pixels.tofile(folder / f"{name}_X.bin")
        np.arange(1, count + 1, dtype=np.uint8).tofile(folder / f"{name}_y.bin")
    (folder / "class_names.txt").write_text("a\nb\nc\n")
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda self: True)
    images = open_images("stl10", root=tmp_path)
    assert images.images.shape == (5, 96, 96, 3)
    assert images.images[0, 0, 5].tolist() == [2, 77, 2]
    assert (images.labels.tolist(), images.class_names) == ([0, 1, 0, 1, 2], ["a", "b", "c"])
    everything = open_images("stl10-all", root=tmp_path)
    assert everything.images[:, 9, 9, 0].tolist() == [2] * 2 + [3] * 3 + [4] * 4
    assert everything.images[8, 0, 5].tolist() == [4, 77, 4]
    assert everything.labels is None


def test_svhn_is_its_test_part(monkeypatch, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3, 4), dtype=np.uint8)  # as published: images last
    savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[1], [9], [10], [2]])})
    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda self: True)
    images = open_images("svhn", root=tmp_path)
    assert (images.images == pixels.transpose(3, 0, 1, 2)).all()
    assert images.labels.tolist() == [1, 9, 0, 2]


def test_dtd_is_all_its_parts(tmp_path):
    home = tmp_path / "dtd" / "dtd"
    save_images(
        home / "images", [f"{kind}/{kind}_{number}.jpg" for kind in ("banded", "dotted") for number in (1, 2, 3)]
    )
    (home / "images" / "dotted" / ".directory").touch()  # is in the archive
    (home / "labels").mkdir()
    for number, part in enumerate(("train", "val", "test"), 1):
        (home / "labels" / f"{part}1.txt").write_text(f"banded/banded_{number}.jpg\ndotted/dotted_{number}.jpg\n")
    images = open_images("dtd", 32, root=tmp_path)
    assert (len(images), images.class_names, images.labels.tolist()) == (6, ["banded", "dotted"], [0] * 3 + [1] * 3)


def test_places365_is_its_validation_part(monkeypatch, tmp_path):
    (tmp_path / "categories_places365.txt").write_text("/a/airfield 0\n/b/barn 1\n")
    (tmp_path / "places365_val.txt").write_text("Places365_val_1.jpg 1\nPlaces365_val_2.jpg 0\n")
    monkeypatch.setattr(torchvision.datasets.places365, "check_integrity", lambda *given, **more: True)
    with pytest.raises(UserError, match=r"unpack val_256\.tar"):
        open_images("places365", 32, root=tmp_path)
    save_images(tmp_path / "val_256", ["Places365_val_1.jpg", "Places365_val_2.jpg"])
    images = open_images("places365", 32, root=tmp_path)
    assert (images.names, images.labels.tolist()) == (["Places365_val_1.jpg", "Places365_val_2.jpg"], [1, 0])
    assert images.class_names == ["/a/airfield", "/b/barn"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("cifar10", "cifar-10-batches-py"),
        ("cifar20", "cifar-100-python"),
        ("stl10", "stl10_binary"),
        ("stl10-all", "stl10_binary"),
        ("svhn", "test_32x32.mat"),
        ("dtd", "dtd"),
        ("places365", "val_256"),
    ],
)
def test_absent_data_set_says_where_it_looked_and_how_to_get_it(name, place, tmp_path):
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path / place))}.*download=True"):
        open_images(name, root=tmp_path)


def save_images(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (200, 0, 0)).save(folder / name)


def save_classes(folder, classes, inner="", count=2):
    for wnid in classes:
        (folder / wnid / inner).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (64, 64), (index, 0, 0)).save(folder / wnid / inner / f"{wnid}_{index}.JPEG")


def test_tiny_imagenet_is_its_training_folder(tmp_path):
    save_classes(tmp_path / "tiny-imagenet-200" / "train", ["n01443537", "n01629819"], "images")
    (tmp_path / "tiny-imagenet-200" / "val").mkdir()
    images = open_images("tinyimagenet", root=tmp_path)
    assert images.images.shape == (4, 64, 64, 3)
    assert images.labels.tolist() == [0, 0, 1, 1]
    assert images.class_names == ["n01443537", "n01629819"]
    with pytest.raises(UserError, match="tiny-imagenet-200"):
        open_images("tinyimagenet", root=tmp_path / "absent")
    assert (native_size("tinyimagenet"), native_size("imagenet10")) == (64, None)  # without the files


@pytest.mark.parametrize("place", [".", "train", "imagenet/train", "imagenet10"])
def test_imagenet_subset_takes_its_classes_only(tmp_path, place):
    save_classes(tmp_path / place, [*read_class_list("imagenet10"), "n01440764"], count=1)
    images = open_images("imagenet10", 32, root=tmp_path)
    assert len(images) == 10
    assert images.class_names == sorted(read_class_list("imagenet10"))
    assert images.names[0] == "n02056570/n02056570_0.JPEG"


def test_missing_imagenet_classes_are_listed(tmp_path):
    classes = read_class_list("imagenet10")
    save_classes(tmp_path, classes[:-2], count=1)
    with pytest.raises(UserError, match=f"8 of 10 are there, missing: {classes[-2]} {classes[-1]}"):
        open_images("imagenet10", root=tmp_path)
    with pytest.raises(UserError, match="0 of 15"):
        open_images("imagenetdogs", root=tmp_path / "absent")


def test_data_folder_is_argument_then_environment_then_default(monkeypatch, tmp_path):
    monkeypatch.delenv("CDC_DATA", raising=False)
    assert str(find_data_root()) == "data"
    monkeypatch.setenv("CDC_DATA", str(tmp_path))
    assert find_data_root() == tmp_path
    assert find_data_root("elsewhere").name == "elsewhere"

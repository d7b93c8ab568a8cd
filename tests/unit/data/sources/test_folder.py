import logging
import os
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data import decode, native_size, open_images
from cdc_plugin.data.decode import UnreadableImageError, decode_file, to_rgb
from cdc_plugin.data.images import survey_images
from cdc_plugin.data.sources import base, folder
from cdc_plugin.data.sources.folder import find_class_folders, list_images
from cdc_plugin.errors import UserError


def save(path, color=(200, 30, 30), size=(40, 40), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)
    return path


def test_class_folders_give_labels_in_alphabetical_order(tmp_path):
    for name in ["cat/2.png", "cat/1.png", "ant/deep/er/1.png"]:
        save(tmp_path / name)
    images = open_images(tmp_path)
    assert images.names == ["ant/deep/er/1.png", "cat/1.png", "cat/2.png"]
    assert images.labels.tolist() == [0, 1, 1]
    assert images.class_names == ["ant", "cat"]
    assert images.images.shape == (3, 40, 40, 3)
    assert (images.source, images.skipped) == (str(tmp_path), [])
    unlabelled = open_images(tmp_path, labels=False)
    assert unlabelled.labels is unlabelled.class_names is None


@pytest.mark.parametrize(
    ("names", "labels", "classes"),
    [
        (["1.png", "2.png"], None, None),  # flat
        (["a/1.png", "2.png"], None, None),  # one image outside of the classes
        (["a/1.png", "a/2.png"], None, None),  # one folder is no partition
        (["train/a/1.png", "train/b/1.png", "val/a/1.png"], [0, 1, 0], ["a", "b"]),
        (["Train/a/1.png", "TEST/b/1.png"], [0, 1], ["a", "b"]),
        (["train/1.png", "test/1.png"], None, None),  # splits are no classes
        (["train/a/1.png", "test/1.png"], None, None),
        (["train/a/1.png", "other/b/1.png"], [1, 0], ["other", "train"]),
    ],
)
def test_which_layouts_hold_labels(names, labels, classes):
    found, class_names = find_class_folders(names)
    assert (None if found is None else found.tolist(), class_names) == (labels, classes)


def test_hidden_and_foreign_files_are_left_out_and_odd_names_kept(tmp_path):
    wanted = ["Ünï cödé/bild 1.PNG", "a b/x.JPeG", "日本/図.webp", "z.tiff"]
    for name in [*wanted, ".hidden.png", ".ipynb_checkpoints/a.png", "__MACOSX/a.png"]:
        save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert list_images(tmp_path) == sorted(wanted)
    assert open_images(tmp_path).names == sorted(wanted)


def test_links_are_followed_but_not_for_ever(tmp_path):
    save(tmp_path / "elsewhere/1.png")
    data = tmp_path / "data"
    save(data / "a/1.png")
    os.symlink(data, data / "a" / "loop")
    os.symlink(tmp_path / "elsewhere", data / "b")
    assert list_images(data) == ["a/1.png", "b/1.png"]


def test_damaged_files_are_skipped_with_a_reason(tmp_path):
    good = save(tmp_path / "a/good.jpg", size=(64, 64))
    save(tmp_path / "b/good.png")
    (tmp_path / "a/cut.jpg").write_bytes(good.read_bytes()[:300])
    (tmp_path / "a/empty.png").touch()
    (tmp_path / "b/text.png").write_text("this is no image")
    (tmp_path / "b/dangling.png").symlink_to(tmp_path / "nowhere.png")
    images = open_images(tmp_path, 16)
    assert images.names == ["a/good.jpg", "b/good.png"]
    assert images.labels.tolist() == [0, 1]
    assert len(images) == len(images.images) == 2
    reasons = dict(images.skipped)
    assert set(reasons) == {"a/cut.jpg", "a/empty.png", "b/text.png", "b/dangling.png"}
    assert "empty" in reasons["a/empty.png"]
    assert "truncated" in reasons["a/cut.jpg"].lower()
    assert str(tmp_path) not in reasons["b/text.png"]


def test_image_beyond_the_pixel_limit_is_skipped_and_a_large_one_read_silently(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    save(tmp_path / "huge.png", size=(50, 50))
    save(tmp_path / "large.png", size=(40, 40))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = open_images(tmp_path, 32)
    assert images.names == ["large.png"]
    assert "too many pixels" in images.skipped[0][1]


def test_camera_orientation_is_applied(tmp_path):
    picture = Image.new("RGB", (40, 40), "black")
    picture.paste("white", (0, 0, 40, 20))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise: white comes to the right
    picture.save(tmp_path / "a.jpg", exif=exif, quality=95)
    pixels = open_images(tmp_path, 40).images[0]
    assert pixels[:, 30:].mean() > 200
    assert pixels[:, :10].mean() < 50


def test_short_side_is_resized_and_the_centre_kept(tmp_path):
    picture = Image.new("RGB", (300, 100), "black")
    picture.paste((0, 255, 0), (100, 0, 200, 100))
    picture.save(tmp_path / "wide.png")
    pixels = open_images(tmp_path, 64).images[0]
    assert pixels.shape == (64, 64, 3)
    assert (pixels[:, 1:-1] == [0, 255, 0]).all()  # the outermost columns blend with their neighbours
    save(tmp_path / "strip.png", size=(1, 20_000))
    assert open_images(tmp_path, 224).images.shape == (2, 256, 256, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F"])
def test_every_mode_becomes_the_same_white(mode):
    white = Image.new("RGB", (4, 4), "white")
    if mode in ("I", "I;16"):
        image = Image.fromarray(np.full((4, 4), 65535, dtype=np.uint16)).convert(mode)
    elif mode == "F":
        image = Image.fromarray(np.ones((4, 4), dtype=np.float32))
    else:
        image = white.convert(mode)
    assert np.asarray(to_rgb(image)).tolist() == np.asarray(white).tolist()


def test_sixteen_bit_gray_is_scaled_not_clipped(tmp_path):
    levels = np.array([[0, 257, 25700, 65535]] * 4, dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    assert np.asarray(decode_file(tmp_path / "deep.png", 4))[0, :, 0].tolist() == [0, 1, 100, 255]
    wide = Image.fromarray(np.array([[0, 7, 255]], dtype=np.int32))
    assert np.asarray(to_rgb(wide))[0, :, 2].tolist() == [0, 7, 255]  # 8-bit numbers in a wide type


def test_float_gray_is_read_by_its_range():
    def read(values):
        return np.asarray(to_rgb(Image.fromarray(np.array([values], dtype=np.float32))))[0, :, 0].tolist()

    assert read([0.0, 0.5, 1.0]) == [0, 128, 255]
    assert read([0.0, 128.0, 255.0]) == [0, 128, 255]
    for bad in ([0.0, float("nan")], [-3.0, 2.0]):
        with pytest.raises(UnreadableImageError):
            read(bad)


def test_transparent_pixels_become_white():
    layer = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    layer.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(to_rgb(layer))[0].tolist() == [[255, 255, 255], [10, 20, 30]]
    palette = Image.new("P", (1, 1), 3)
    palette.info["transparency"] = 3
    assert np.asarray(to_rgb(palette))[0].tolist() == [[255, 255, 255]]


def test_first_frame_of_an_animation_is_taken(tmp_path):
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_images(tmp_path, 20).images[0, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: save(file.parent / "new.png"),
        lambda file: file.unlink(),
        lambda file: file.rename(file.parent / "3.png"),
        lambda file: save(file, size=(41, 41)),
        lambda file: os.utime(file, ns=(10**18, 10**18)),
    ],
    ids=["added", "removed", "renamed", "rewritten", "touched"],
)
def test_digest_changes_with_the_files_only(tmp_path, change):
    first = save(tmp_path / "a" / "1.png")
    save(tmp_path / "2.png", color=(1, 2, 3))
    before = open_images(tmp_path).digest
    assert open_images(tmp_path, 64, labels=False).digest == before
    change(first)
    assert open_images(tmp_path).digest != before


def test_a_listing_that_takes_long_logs_how_many_images_it_has_found(tmp_path, monkeypatch, caplog):
    for name in ("1.png", "a/2.png", "b/3.png"):
        save(tmp_path / name)
    monkeypatch.setattr(folder, "LOG_INTERVAL", -1)
    with caplog.at_level(logging.INFO):
        list_images(tmp_path)
    assert f"{tmp_path}: 2 images so far" in caplog.text


def test_native_size_is_the_side_of_uniform_squares(tmp_path):
    save(tmp_path / "1.png", size=(48, 48))
    save(tmp_path / "2.png", size=(48, 48))
    assert native_size(tmp_path) == 48
    assert native_size(str(tmp_path / "1.png")) == 48
    save(tmp_path / "3.png", size=(48, 40))
    assert native_size(tmp_path) is None
    assert open_images(tmp_path).images.shape == (3, 256, 256, 3)


def test_list_of_paths_and_a_single_file_keep_their_order(tmp_path):
    late = save(tmp_path / "z.png", color=(9, 9, 9))
    early = save(tmp_path / "a.png", color=(3, 3, 3))
    images = open_images([late, str(early)])
    assert images.images[:, 0, 0, 0].tolist() == [9, 3]
    assert images.names == [late.as_posix(), early.as_posix()]
    assert open_images(str(early)).names == ["a.png"]


def test_progress_sees_every_image(tmp_path):
    for index in range(40):
        save(tmp_path / f"{index:02}.png", color=(index, 0, 0))
    seen = []

    def progress(steps, total, description):
        seen.append((total, description))
        for step in steps:
            yield step
            seen.append(step)

    images = open_images(tmp_path, progress=progress)
    assert (seen[0], len(seen)) == ((40, f"reading {tmp_path}"), 41)
    assert images.images[:, 0, 0, 0].tolist() == list(range(40))


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("a.csv", "absent", r"nothing at .*absent.*cifar10"),
        ("a.csv", "", r"jpg, jpeg, png.*found 1 \.csv"),
        ("a.csv", "a.csv", "unpack archives"),
        ("a.heic", "", r"found 1 \.heic; .*cdc-plugin\[heic\]"),
        ("a.heic", "a.heic", r"cdc-plugin\[heic\]"),
        ("a.NEF", "", "raw photos"),
        ("a.mp4", "", "ffmpeg"),
        ("a.npz", "", r"npz or \.npy file itself"),
        ("a.png", "", r"none of the 1 images.*a\.png: the file is empty"),
    ],
)
def test_sources_without_an_image_are_refused_in_words(tmp_path, file, source, message):
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=message):
        open_images(str(tmp_path / source))


def test_files_of_any_size_are_read_alike(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    for ending in ("png", "tif", "webp", "bmp"):
        Image.fromarray(pixels).save(tmp_path / f"a.{ending}", **({"lossless": True} if ending == "webp" else {}))
    at_once = open_images(tmp_path, 20)
    monkeypatch.setattr(decode, "READ_WHOLE", 0)
    assert (at_once.images == pixels).all()
    assert (open_images(tmp_path, 20).images == pixels).all()
    assert at_once.skipped == []


def test_files_that_are_no_images_are_counted_and_notes_are_not(tmp_path):
    save(tmp_path / "a.png")
    for name in ("a.heic", "sub/b.HEIC", "c.mp4", "notes.txt", "labels.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = next(warning["text"] for warning in open_images(tmp_path).warnings if warning["kind"] == "left_aside")
    assert text.startswith("left aside: 2 .heic, 1 .mp4; ")
    assert "heic]" in text
    assert "ffmpeg" in text
    assert survey_images(tmp_path, 32).left_aside == text


@pytest.mark.skipif(".avif" not in base.find_extensions(), reason="this Pillow reads no AVIF")
def test_avif_is_read(tmp_path):
    save(tmp_path / "a.avif")
    assert open_images(tmp_path).names == ["a.avif"]


def test_heic_is_read_where_its_reader_is_installed_and_else_named(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))  # as some phones name it
    save(tmp_path / "b.png")
    decode._register_heif.cache_clear()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert "cdc-plugin[heic]" in dict(open_images(tmp_path, 32).skipped)["a.jpg"]
    calls = []
    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=lambda: calls.append(1)))
    decode._register_heif.cache_clear()
    open_images(tmp_path, 32)
    assert calls == [1]
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: name == "pillow_heif")
    base.find_extensions.cache_clear()
    assert {".heic", ".heif", ".jpg"} <= set(base.find_extensions())
    base.find_extensions.cache_clear()
    decode._register_heif.cache_clear()

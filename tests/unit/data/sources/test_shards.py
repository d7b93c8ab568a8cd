"""Tar shards: found by pattern, range or folder, read in place, labelled where every sample has a label."""

import io
import json
import logging
import os
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data import native_size, open_images
from cdc_plugin.data.sources import shards
from cdc_plugin.data.stream import open_stream
from cdc_plugin.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def write(path, files, mode="w"):
    """A tar file of {name: bytes}, or of (name, bytes) where a name comes twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "cache"))
    for shard in range(2):
        files = {}
        for number in range(3):
            files[f"s{number}.png"] = png(PIXELS[3 * shard + number])
            files[f"s{number}.cls"] = str(shard).encode()
        write(tmp_path / "shards" / f"part-00{shard + 8}.tar", files)
    return tmp_path / "shards"


NAMES = [f"part-00{shard}/s{number}.png" for shard in (8, 9) for number in range(3)]


@pytest.mark.parametrize("how", ["", "*.tar", "part-{008..009}.tar"])
def test_shards_are_named_by_folder_pattern_or_range(folder, how):
    images = open_images(str(folder / how), 16)
    assert images.names == NAMES
    assert (images.images == PIXELS).all()
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.skipped == []


def test_one_shard_and_its_size(folder):
    write(folder / "part-010.tar", {})  # without members, which is no damage
    assert open_images(folder / "part-008.tar").images.shape == (3, 16, 16, 3)
    assert open_images(str(folder)).skipped == []
    assert native_size(str(folder)) == 16


def test_what_is_no_image_every_kind_of_link_and_earlier_members_of_a_name_are_passed_over(tmp_path):
    files = [
        ("deep/1.png", png(PIXELS[1])),
        ("./deep/1.png", png(PIXELS[0])),
        ("2.txt", b"text"),
        (".3.png", b"hidden"),
    ]
    path = write(tmp_path / "a.tar", files)
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"{kind.decode()}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    images = open_images(path, 16)
    assert images.names == ["a/deep/1.png"]
    assert (images.images[0] == PIXELS[0]).all()
    assert images.labels is None


def test_shards_of_one_name_in_two_folders_keep_their_images_apart(tmp_path):
    for number in range(2):
        write(tmp_path / f"x{number}" / "a.tar", {"1.png": png(PIXELS[number])})
    assert len(set(open_images(f"{tmp_path}/*/a.tar", 16).names)) == 2


def test_labels_are_words_in_json_or_none_unless_all_have_one(tmp_path, caplog):
    files = {}
    for number, word in enumerate(["dog", "cat", "dog"]):
        files |= {f"{number}.png": png(PIXELS[number]), f"{number}.json": json.dumps({"label": word}).encode()}
    images = open_images(write(tmp_path / "a.tar", files), 16)
    assert (images.labels.tolist(), images.class_names) == ([1, 0, 1], ["cat", "dog"])
    files["0.json"] = b"no json"
    with caplog.at_level(logging.INFO):
        assert open_images(write(tmp_path / "b.tar", files), 16).labels is None
    assert "labels are not used: 1 of 3 images have none" in caplog.text


def member(path, name):
    with tarfile.open(path) as archive:
        return archive.getmember(name)


def test_a_shard_that_was_cut_within_an_image_gives_what_is_before(folder):
    path = folder / "part-008.tar"
    os.truncate(path, member(path, "s2.png").offset_data + 20)
    images = open_images(path, 16)
    assert images.names == NAMES[:2]
    image, (shard, reason) = images.skipped
    assert image == (NAMES[2], "the shard ends within it")
    assert shard == "part-008.tar"
    assert "is cut or damaged" in reason


@pytest.mark.parametrize("harm", ["cut before a header", "cut within a header", "a damaged header"])
def test_what_a_damaged_header_hides_is_told_and_labels_of_the_others_are_kept(folder, harm):
    path = folder / "part-008.tar"
    place = member(path, "s2.png").offset
    if harm == "a damaged header":
        content = bytearray(path.read_bytes())
        content[place + 20 : place + 200] = b"?" * 180
        path.write_bytes(content)
    else:
        os.truncate(path, place + (100 if "within" in harm else 0))
    images = open_images(str(folder), 16)
    assert images.names == [name for name in NAMES if name != "part-008/s2.png"]
    assert images.labels.tolist() == [0, 0, 1, 1, 1]
    ((shard, reason),) = images.skipped
    assert shard == "part-008.tar"
    assert reason.endswith("only what is before that is used, 2 images")


@pytest.mark.parametrize("content", [b"", b"?" * 2000])
def test_a_shard_that_is_none_is_told_and_the_others_are_used(folder, content):
    (folder / "part-010.tar").write_bytes(content)
    images = open_images(str(folder), 16)
    assert images.names == NAMES
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    ((shard, reason),) = images.skipped
    assert shard == "part-010.tar"
    assert reason.startswith("is no tar file")
    stream = open_stream(str(folder), 16)
    assert [name for chunk in stream.chunks(4) for name in chunk.names] == NAMES
    assert [reason for _, reason in stream.unreadable] == [reason]


@pytest.mark.parametrize("size", ["-1536", "9" * 30])  # the first leads to the begin of its own headers
def test_absurd_sizes_of_members_are_damage(tmp_path, size):
    content, member = png(PIXELS[0]), tarfile.TarInfo("a.png")
    member.size, member.pax_headers = len(content), {"size": size}
    headers = member.tobuf(tarfile.PAX_FORMAT)
    (tmp_path / "a.tar").write_bytes(headers + content + bytes(-len(content) % 512 + 1024))
    with pytest.raises(UserError, match=f"a size of {size} bytes"):
        open_images(tmp_path / "a.tar", 16)


def test_shards_without_images_are_refused_with_the_reason(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"no shard with content at .*a\.tar"):
        open_images(tmp_path / "a.tar", 16)
    with pytest.raises(UserError, match=r"members$"):
        open_images(write(tmp_path / "b.tar", {"1.txt": b"text"}), 16)


def test_a_listing_that_takes_long_says_how_far_it_is(folder, monkeypatch, caplog):
    monkeypatch.setattr(shards, "LOG_INTERVAL", -1)
    with caplog.at_level(logging.INFO):
        open_images(str(folder), 16)
    assert "listing shards: 1 of 2, 3 images so far" in caplog.text


def test_a_shard_that_vanishes_is_skipped_with_a_reason(folder):
    def watch(steps, total, description):
        (folder / "part-009.tar").unlink()
        return steps

    images = open_images(str(folder), 16, progress=watch)
    assert images.names == NAMES[:3]
    assert "FileNotFoundError" in images.skipped[0][1]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_compressed_shards_are_refused_with_what_to_do(tmp_path, name):
    path = write(tmp_path / name, {"1.png": png(PIXELS[0])}, "w:gz")
    with pytest.raises(UserError, match="gunzip"):
        open_images(path, 16)


@pytest.mark.parametrize(
    ("how", "message"), [("none-*.tar", "no shard with content"), ("part-{008..010}.tar", r"part-010\.tar")]
)
def test_shards_that_are_not_there_are_named(folder, how, message):
    with pytest.raises(UserError, match=message):
        open_images(str(folder / how), 16)


def test_folders_that_hold_images_are_no_shards(folder):
    Image.fromarray(PIXELS[0]).save(folder / "1.png")
    assert open_images(folder, 16).names == ["1.png"]


def test_the_digest_changes_with_a_shard(folder):
    first = open_images(str(folder), 16)
    write(folder / "part-009.tar", {"new.png": png(PIXELS[0])})
    changed = open_images(str(folder), 16)
    assert (changed.names[-1], changed.labels) == ("part-009/new.png", None)
    assert changed.digest != first.digest


def test_nothing_in_a_shard_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = write(tmp_path / "a.tar", {"1.png": png(PIXELS[0]), "1.pyd": pickle.dumps(Trap()), "2.png": b"no image"})
    images = open_images(path, 16)
    assert images.names == ["a/1.png"]
    assert not (tmp_path / "sprung").exists()

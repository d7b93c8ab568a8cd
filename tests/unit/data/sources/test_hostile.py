"""Files of strangers that would hang, fill the memory or lie about their size: each is named or refused at once."""

import io
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.config.recipes import find_recipe
from cdc_plugin.data import native_size, open_images
from cdc_plugin.data.sources import arrays
from cdc_plugin.data.stream import open_stream
from cdc_plugin.errors import DataError, UserError


def header(shape, kind="|u1"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
@pytest.mark.parametrize("name", ["a.png", "z.png"])
def test_only_regular_files_are_opened(tmp_path, make, name):
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"m{number}.png")
    make(tmp_path / name)
    images = open_images(tmp_path, 8)
    assert (len(images), images.skipped) == (3, [(name, "it is not a regular file")])
    (tmp_path / "shards").mkdir()
    make(tmp_path / "shards" / "a.tar")
    with pytest.raises(DataError, match="not a regular file"):
        open_images(tmp_path / "shards", 8)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
def test_files_of_the_system_that_state_no_size_are_not_read(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "z.png").symlink_to("/proc/self/status")  # as /proc/kmsg, which never ends
    assert open_images(tmp_path, 8).skipped == [("z.png", "the file is empty")]
    (tmp_path / "a.npy").symlink_to("/proc/self/status")
    with pytest.raises(DataError, match="is empty"):
        open_images(tmp_path / "a.npy", 8)


def test_an_archive_of_very_many_arrays_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MOST_MEMBERS", 2)
    np.savez(tmp_path / "a.npz", *(np.zeros((2, 8, 8, 3), np.uint8) for _ in range(3)))
    with pytest.raises(DataError, match="holds 3 arrays"):
        open_images(tmp_path / "a.npz", 8)


@pytest.mark.parametrize("name", ["lie.npy", "lie.npz"])
@pytest.mark.parametrize("opener", [open_images, open_stream])
def test_a_header_that_states_more_than_there_is_is_refused(tmp_path, name, opener):
    content = header((10**9, 32, 32, 3)) + bytes(1000)
    if name.endswith(".npy"):
        (tmp_path / name).write_bytes(content)
    else:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("x.npy", content)
    with pytest.raises(DataError, match="cannot be read as a NumPy file"):
        opener(tmp_path / name, 32)


def test_an_array_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "UNPACKED_FREELY", 100_000)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((200, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match="unpacks to more than"):
        open_images(tmp_path / "bomb.npz", 32)


def test_a_member_of_a_shard_that_states_a_terabyte_is_skipped(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("good.png")
        member.size = len(picture.getvalue())
        archive.addfile(member, io.BytesIO(picture.getvalue()))
        end = archive.offset
    whole = (tmp_path / "a.tar").read_bytes()[:end]
    for kind, named in ((tarfile.REGTYPE, "a/huge.png"), (tarfile.GNUTYPE_LONGNAME, "a.tar")):
        huge = tarfile.TarInfo("huge.png")
        huge.size, huge.type = 1 << 50, kind
        (tmp_path / "a.tar").write_bytes(whole + huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
        images = open_images(str(tmp_path / "a.tar"), 8)
        assert images.names == ["a/good.png"]
        assert named in dict(images.skipped)
    chain = tarfile.TarInfo("deep")
    chain.size, chain.type = 13, tarfile.XHDTYPE  # a header about the next, a thousand times
    (tmp_path / "a.tar").write_bytes(whole + 1000 * (chain.tobuf() + b"13 path=deep\n".ljust(512, b"\0")))
    assert "a.tar" in dict(open_images(str(tmp_path / "a.tar"), 8).skipped)


@pytest.mark.parametrize("opener", [lambda path: open_images(path, 8), load_checkpoint, find_recipe])
def test_the_home_of_somebody_unknown_is_a_path_that_is_not_there(opener):
    with pytest.raises(UserError, match="~nobody-of-that-name/x"):
        opener("~nobody-of-that-name/x")


@pytest.mark.parametrize("pattern", ["part-{000..99999999999}.tar", "p" + "{0..9}" * 9 + ".tar"])
def test_a_range_of_endless_shards_is_refused(tmp_path, pattern):
    with pytest.raises(DataError, match="shards"):
        open_images(str(tmp_path / pattern), 8)


@pytest.mark.parametrize(
    "content",
    [
        *(
            header(shape) + bytes(1 << 21)
            for shape in [(-8, 16, 16, 3), (2**62, 2**62, 4), (10**12, 0, 3), (1, 600, 600, 3), (True, 2, 2, 3), ()]
        ),
        *(header((8, 16, 16), kind) + bytes(1 << 17) for kind in ("<M8[s]", "|V2", "<c8", "<U1")),
        b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"(" * 8999 + b"\n",
    ],
)
@pytest.mark.parametrize("opener", [open_images, lambda path: open_stream(path, 32), native_size])
def test_arrays_of_no_images_are_refused_before_memory_is_taken(tmp_path, monkeypatch, content, opener):
    monkeypatch.setattr(arrays, "LARGEST_IMAGE", 1 << 20)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npy"):
        opener(tmp_path / "a.npy")


def test_large_images_are_read_a_few_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 2 * 16 * 16 * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "a.npy", pixels)
    assert [len(chunk.squares) for chunk in open_stream(tmp_path / "a.npy", 16).chunks(4)] == [2, 2, 2, 1]


def test_a_name_with_a_nul_is_skipped_and_an_endless_note_is_no_label(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert [name for name, _ in open_images([Path("a\0b.png"), tmp_path / "a.png"], 8).skipped] == ["a\0b.png"]
    (tmp_path / "a.json").write_text('{"label": ' + "[" * 100_000)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path, "")
    assert open_images(str(tmp_path / "a.tar"), 8).labels is None

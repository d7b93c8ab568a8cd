"""Files of strangers that would hang, fill the memory or lie about their size: each is named or refused at once."""

import io
import os
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data import open_images
from cdc_plugin.data.sources import arrays
from cdc_plugin.data.stream import open_stream
from cdc_plugin.errors import DataError


def header(shape):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
@pytest.mark.parametrize("name", ["a.png", "z.png"])
def test_only_regular_files_are_opened(tmp_path, make, name):
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"m{number}.png")
    make(tmp_path / name)
    images = open_images(tmp_path, 8)
    assert (len(images), images.skipped) == (3, [(name, "it is not a regular file")])


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
    huge = tarfile.TarInfo("huge.png")
    huge.size = 10**12
    content = (tmp_path / "a.tar").read_bytes()[:end] + huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    (tmp_path / "a.tar").write_bytes(content)
    images = open_images(str(tmp_path / "a.tar"), 8)
    assert images.names == ["a/good.png"]
    assert any("huge" in name for name, _ in images.skipped)


@pytest.mark.parametrize("pattern", ["part-{000..99999999999}.tar", "p" + "{0..9}" * 9 + ".tar"])
def test_a_range_of_endless_shards_is_refused(tmp_path, pattern):
    with pytest.raises(DataError, match="shards"):
        open_images(str(tmp_path / pattern), 8)

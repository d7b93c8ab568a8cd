"""Rows on disk: read like an array in memory, written whole or not at all."""

import errno
import os
import pickle
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from cdc_plugin.data.row_file import SEAL, RowFile, RowPart, RowWriter, format_bytes, open_whole
from cdc_plugin.errors import UserError

ROWS = np.arange(20 * 3 * 2, dtype=np.float32).reshape(20, 3, 2)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "rows.f32").write_bytes(ROWS.tobytes())
    return tmp_path / "rows.f32"


@pytest.mark.parametrize(
    "wanted",
    [
        3,
        -1,
        np.int64(4),
        slice(None),
        slice(2, 9),
        slice(15, 3, -4),
        [5, 6, 7, 1, 1, 0, 19],
        [],
        np.array([-2, 3]),
        np.arange(20) % 3 == 0,
        np.array([[1, 2], [3, 19]]),
    ],
)
def test_rows_are_chosen_as_from_an_array(path, wanted):
    chosen = RowFile(path, ROWS.shape, np.float32)[wanted]
    expected = ROWS[wanted] if not isinstance(wanted, list) else ROWS[np.array(wanted, dtype=int)]
    assert chosen.dtype == np.float32
    assert np.array_equal(chosen, expected)
    chosen[...] = -1  # a fresh array: the file is not touched
    assert np.array_equal(RowFile(path, ROWS.shape, np.float32)[:], ROWS)


@pytest.mark.parametrize("wanted", [20, -21, [3, 20], np.array([0.5]), np.ones(3, dtype=bool)])
def test_rows_that_are_not_there_raise(path, wanted):
    with pytest.raises(IndexError):
        RowFile(path, ROWS.shape, np.float32)[wanted]


def test_it_tells_its_shape_and_skips_what_comes_first(path):
    rows = RowFile(path, (18, 3, 2), "f4", offset=2 * 24)
    assert (len(rows), rows.shape, rows.dtype, rows.ndim, rows.nbytes) == (18, (18, 3, 2), np.dtype("f4"), 3, 18 * 24)
    assert np.array_equal(rows[[0, 17]], ROWS[[2, 19]])


def test_reading_without_positioned_reads_gives_the_same(path, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    assert np.array_equal(RowFile(path, ROWS.shape, "f4")[[3, 4, 0]], ROWS[[3, 4, 0]])


def test_a_file_that_is_too_short_is_refused(path):
    with pytest.raises(OSError, match="expected 504 bytes"):
        RowFile(path, (21, 3, 2), "f4")


def test_a_file_that_shrinks_raises_instead_of_giving_garbage(path):
    rows = RowFile(path, ROWS.shape, "f4")
    os.truncate(path, 100)
    with pytest.raises(UserError, match="shorter"):
        rows[10:]


def test_a_disk_that_fails_is_said_in_words(path, monkeypatch):
    rows = RowFile(path, ROWS.shape, "f4")

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(rows, "_read_some", fail)
    with pytest.raises(UserError, match=r"rows\.f32 can not be read any more \(Input/output error\)"):
        rows[0]


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps open files")
def test_rows_of_a_removed_file_can_still_be_read(path):
    rows = RowFile(path, ROWS.shape, "f4")
    path.unlink()
    assert np.array_equal(rows[7], ROWS[7])


def test_threads_may_read_at_once(path):
    rows = RowFile(path, ROWS.shape, "f4")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda index: rows[index % 20], range(400)))
    assert all(np.array_equal(row, ROWS[index % 20]) for index, row in enumerate(found))


def test_a_pickled_copy_opens_the_file_again(path):
    rows = pickle.loads(pickle.dumps(RowFile(path, ROWS.shape, "f4")))
    assert np.array_equal(rows[2:4], ROWS[2:4])


def test_rows_put_in_any_order_come_back(tmp_path):
    with RowWriter(tmp_path / "deep" / "rows", 20, (3, 2), "f4") as writer:
        writer.put(12, ROWS[12:])
        writer.put(0, ROWS[:12])
        assert not writer.path.exists()
        writer.finish()
    assert np.array_equal(RowFile(writer.path, ROWS.shape, "f4")[:], ROWS)
    assert [file.name for file in writer.path.parent.iterdir()] == ["rows"]


def test_fewer_rows_than_planned_may_be_kept(tmp_path):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        writer.put(0, ROWS[:5])
        writer.finish(5)
    assert (tmp_path / "rows").stat().st_size == 5 * 24 + SEAL
    assert np.array_equal(open_whole(tmp_path / "rows", (5, 3, 2), "f4")[:], ROWS[:5])


def test_what_was_written_in_any_order_and_twice_is_whole(tmp_path):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        for first, last in ((0, 5), (12, 20), (5, 12), (3, 6)):
            writer.put(first, ROWS[first:last])
        writer.finish()
    assert np.array_equal(open_whole(tmp_path / "rows", ROWS.shape, "f4")[:], ROWS)


@pytest.mark.parametrize("harm", ["cut", "longer", "one bit", "the seal", "no seal", "other shape"])
def test_what_is_cut_or_damaged_is_not_taken_for_whole(tmp_path, caplog, harm):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        writer.put(0, ROWS)
        writer.finish()
    content = bytearray(writer.path.read_bytes())
    if harm == "one bit":
        content[100] ^= 1
    elif harm == "the seal":
        content[-1] ^= 1
    elif harm in ("cut", "no seal"):
        del content[-10 if harm == "cut" else -SEAL :]
    elif harm == "longer":
        content += b"x"
    writer.path.write_bytes(content)
    assert open_whole(writer.path, (19 if harm == "other shape" else 20, 3, 2), "f4") is None
    assert "made again" in caplog.text


def test_what_is_not_there_is_not_there_without_a_word(tmp_path, caplog):
    assert open_whole(tmp_path / "rows", ROWS.shape, "f4") is None
    assert caplog.text == ""


def test_sizes_are_said_as_people_say_them():
    assert [format_bytes(size) for size in (0, 3000, 83 << 20, 3 << 29)] == ["0 bytes", "3 KB", "83 MB", "1.5 GB"]


def _put_second_half(temporary):
    with RowPart(temporary, (3, 2), "f4") as part:
        part.put(10, ROWS[10:])


def test_several_processes_write_one_file(tmp_path):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        other = get_context("fork" if os.name == "posix" else "spawn").Process(
            target=_put_second_half, args=(writer.temporary,)
        )
        other.start()
        writer.put(0, ROWS[:10])
        other.join()
        writer.finish()
    assert np.array_equal(open_whole(tmp_path / "rows", ROWS.shape, "f4")[:], ROWS)


def test_an_unfinished_file_never_gets_its_name(tmp_path):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        writer.put(0, ROWS)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_shape_are_refused(tmp_path):
    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer, pytest.raises(ValueError, match="shape"):
        writer.put(0, ROWS[:, :2])


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1))
    with pytest.raises(UserError, match="are free there"):
        RowWriter(tmp_path / "rows", 20, (3, 2), "f4")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_said_in_words(tmp_path):
    class Full:
        closed = False

        def seek(self, place):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with RowWriter(tmp_path / "rows", 20, (3, 2), "f4") as writer:
        writer._file.close()
        writer._file = Full()
        with pytest.raises(UserError, match=r"no space is left for rows in .*make room"):
            writer.put(0, ROWS)
    assert list(tmp_path.iterdir()) == []

import errno
import json
import os

import numpy as np
import pytest

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.part_files import NOTES, Part, PartFolder, parts_beside, remove_parts

ABOUT = {"model": "a1", "data": "b2", "images": 30}


def part(start: int, count: int = 3) -> Part:
    places = np.arange(start, start + count)
    return Part(
        places, {"cluster": places % 2, "confidence": np.full(count, 0.5, np.float32)}, [(start + 9, "broken ü")]
    )


def same(one: Part, other: Part) -> bool:
    columns = one.columns.keys() == other.columns.keys() and all(
        (one.columns[name] == other.columns[name]).all() and one.columns[name].dtype == other.columns[name].dtype
        for name in one.columns
    )
    return columns and (one.places == other.places).all() and one.skipped == other.skipped


@pytest.fixture
def folder(tmp_path) -> PartFolder:
    return PartFolder(parts_beside(tmp_path / "new.csv"), 3, ABOUT)


def test_parts_come_back_as_they_were_and_in_order(folder):
    nothing = Part(np.empty(0, np.int64), {}, [(3, "empty"), (4, "empty")])
    saved = [part(0), nothing, part(6)]
    for number in (2, 0, 1):
        folder.save(number, saved[number])
    assert folder.resume() == [0, 1, 2]
    assert all(same(one, other) for one, other in zip(folder, saved, strict=True))
    assert folder.path.name == ".new.csv.parts"
    assert json.loads((folder.path / NOTES).read_text()) == ABOUT


def test_nothing_is_made_before_the_first_part_is_finished(folder):
    assert folder.resume() == []
    assert not folder.path.exists()
    remove_parts(folder.path)


@pytest.mark.parametrize("name", ["model", "data", "images"])
def test_parts_of_something_else_are_discarded_and_the_log_says_why(folder, caplog, name):
    folder.save(0, part(0))
    folder.save(1, part(3))
    other = PartFolder(folder.path, 3, {**ABOUT, name: "other"})
    assert other.resume() == []
    assert f"2 finished parts in {folder.path} are not used: {name} changed" in caplog.text
    assert folder.resume() == []
    other.save(1, part(3))
    assert other.resume() == [1]


def test_what_is_going_on_is_said(folder, caplog):
    folder.save(1, part(3))
    folder.resume()
    assert "going on: 1 of 3 parts are finished" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04half", None], ids=["empty", "no archive", "cut off"])
def test_a_damaged_part_counts_as_missing(folder, damage, caplog):
    folder.save(0, part(0))
    folder.save(1, part(3))
    file = folder.file(1)
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    assert folder.resume() == [0]
    assert not file.exists()
    assert "damaged" in caplog.text


def test_a_flipped_bit_counts_as_damage(folder):
    folder.save(0, part(0, 500))
    content = bytearray(folder.file(0).read_bytes())
    content[len(content) // 2] ^= 1
    folder.file(0).write_bytes(content)
    assert folder.resume() == []


def test_what_a_killed_process_left_of_a_part_is_removed_without_a_word(folder, caplog):
    folder.save(0, part(0))
    (folder.path / ".000001-x.npz.abc").write_bytes(b"half")
    assert folder.resume() == [0]
    assert len(list(folder.path.iterdir())) == 2
    assert "not used" not in caplog.text


def test_a_full_disk_leaves_finished_parts_and_no_half_one(folder, monkeypatch):
    folder.save(0, part(0))

    def full(file, **_arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="free some space and run again"):
        folder.save(1, part(3))
    assert folder.resume() == [0]
    assert {path.name for path in folder.path.iterdir()} == {NOTES, folder.file(0).name}


def test_a_part_that_another_machine_wrote_elsewhere_is_named(folder):
    folder.save(0, part(0))
    with pytest.raises(UserError, match=r"part 2 of 3 cannot be read .* a disk that all of them share"):
        list(folder)

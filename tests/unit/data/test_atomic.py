import csv
import errno
import io
import os
import stat

import pytest
from safetensors import SafetensorError

from cdc_plugin.data.atomic import join_csv, unescape_cell, write_atomically
from cdc_plugin.errors import UserError


def failing(error, text=""):
    """Return a function that raises the error, after writing the text to its first argument if there is one."""

    def fail(*arguments):
        if text:
            arguments[0].write_text(text)
        raise error

    return fail


def test_a_file_is_replaced_whole_as_readable_as_others_and_no_other_is_left(tmp_path):
    path, ordinary = tmp_path / "results ä.txt", tmp_path / "ordinary"
    path.write_text("old")
    ordinary.touch()
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(ordinary).st_mode)
    assert set(tmp_path.iterdir()) == {path, ordinary}


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("write", ValueError("no"), "no"),
        ("write", KeyboardInterrupt(), "^$"),
        ("write", OSError(errno.EIO, "broken"), "cannot write"),
        ("replace", FULL, r"no space left while writing .*last\.pt.*--resume"),
        ("fsync", FULL, r"no space left while writing .*last\.pt.*--resume"),
    ],
    ids=str,
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken, error, message):
    path = tmp_path / "last.pt"
    path.write_text("old")
    if broken != "write":
        monkeypatch.setattr(os, broken, failing(error))
    with pytest.raises((type(error), UserError), match=message):
        write_atomically(path, failing(error, "half") if broken == "write" else lambda file: file.write_text("new"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
        RuntimeError("basic_ios::clear: iostream error"),
        RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 18176 vs 18072"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=str,
)
def test_a_full_disk_is_recognised_in_the_words_of_other_writers_too(tmp_path, error):
    with pytest.raises(UserError, match="disk full"):
        write_atomically(tmp_path / "last.pt", failing(error))


def test_other_runtime_errors_are_not_disguised_and_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"):
        write_atomically(tmp_path / "last.pt", failing(RuntimeError("shapes do not match")))
    with pytest.raises(UserError, match="cannot write"):
        write_atomically(tmp_path / "absent" / "file", lambda temporary: temporary.write_text("x"))


def test_names_are_no_formulas_keep_to_one_line_of_utf_8_and_read_back_exactly():
    signs = [*"=+-@\t\r\n＝＋－＠'\";\\\0\udcff\x85\u2028漢\ud800", "", " =", "a;=", "a;\t-"]
    ends = ("1+1.png", "a\nb\r,c.png", "", "\\n", "-5", "cmd|' /C calc'!A0")
    names = [sign + end for sign in signs for end in ends]
    text = join_csv([[name, -0.5, "-0.500000"] for name in names])
    assert len(text.encode("utf-8").splitlines()) == len(text.splitlines()) == len(names)
    for delimiter in ",;":
        cells = [cell for row in csv.reader(io.StringIO(text), delimiter=delimiter) for cell in row]
        assert not any(cell.lstrip().startswith(tuple("=+@＝＋－＠\t\r")) for cell in cells)
        assert not any(cell.lstrip().startswith("-") and not cell.startswith("-") for cell in cells)
    rows = list(csv.reader(io.StringIO(text)))
    assert [unescape_cell(row[0]) for row in rows] == names
    assert {tuple(row[1:]) for row in rows} == {("-0.5", "-0.500000")}
    assert unescape_cell("'typed \\ by hand") == "'typed \\ by hand"

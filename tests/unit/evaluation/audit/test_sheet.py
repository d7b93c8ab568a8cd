"""audit.csv as it is written, and as spreadsheets and people give it back."""

import csv
import io
import os
from pathlib import Path

import numpy as np
import pytest

from cdc_plugin.data.atomic import join_csv
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.audit.sheet import build_sheet, read_sheet


@pytest.fixture
def table() -> np.recarray:
    names = np.array([f'ordner, {index}/bild ä "{index}".png' for index in range(8)], dtype=object)
    columns = [names, np.arange(8) % 3, np.linspace(0.3, 1.0, 8).astype(np.float32), np.arange(8) > 3]
    return np.rec.fromarrays(columns, names=["path", "cluster", "confidence", "selected"])


@pytest.fixture
def lines(table) -> list[list[str]]:
    return build_sheet(table, np.array([5, 2, 7]), "photos by\nmodel; a")


def refusal(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        read_sheet(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def as_text(lines: list[list[str]], **options) -> str:
    text = io.StringIO()
    csv.writer(text, **options).writerows(lines)
    return text.getvalue()


def test_the_columns_are_these_and_images_without_a_path_go_by_their_index(lines):
    assert lines[0] == ["id", "path", "cluster", "answer", "confidence", "selected", "audit"]
    audit = "3 of 8 images; photos by model; a"
    assert lines[1][1:] == ['ordner, 5/bild ä "5".png', "2", "", "0.800000", "1", audit]
    columns = [np.array(["0", "1"], dtype=object), np.array([0, 1]), np.array([0.5, 0.6])]
    table = np.rec.fromarrays(columns, names=["index", "cluster", "confidence"])
    assert build_sheet(table, np.array([1]), "x")[0] == ["id", "index", "cluster", "answer", "confidence", "audit"]


def test_a_pipe_or_device_is_no_audit(tmp_path):
    os.mkfifo(tmp_path / "audit.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name in ("audit.csv", "zero.csv"):
        with pytest.raises(UserError, match="no regular file"):
            read_sheet(tmp_path / name)


def test_what_was_written_is_read(tmp_path, lines):
    path = tmp_path / "audit.csv"
    path.write_text(join_csv(lines), encoding="utf-8")
    sheet = read_sheet(path)
    assert (sheet.drawn, sheet.image_count, sheet.source) == (3, 8, "photos by model; a")
    assert [(row.cluster, row.confidence, row.selected, row.answer) for row in sheet.rows] == [
        (2, 0.8, True, ""),
        (2, 0.5, False, ""),
        (1, 1.0, True, ""),
    ]
    assert read_sheet(tmp_path) == sheet  # the folder will do


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
@pytest.mark.parametrize("options", [{"delimiter": ";", "lineterminator": "\r\n"}, {"delimiter": "\t"}, {}])
def test_spreadsheets_may_choose_separators_line_ends_and_encodings(tmp_path, lines, options, encoding):
    path = tmp_path / "filled.csv"
    lines[1][3] = " Yes "
    path.write_bytes(as_text(lines, **options).encode(encoding))
    sheet = read_sheet(path)
    assert [row.answer for row in sheet.rows] == ["Yes", "", ""]
    assert sheet.image_count == 8


def test_a_decimal_comma_empty_lines_shorter_numbers_and_columns_of_ones_own_are_read(tmp_path, lines):
    path = tmp_path / "filled.csv"
    lines[1][4], lines[3][4], lines[0][3] = "0,8", "1", "Answer"
    rows = [[*line, "remark"] for line in lines]
    path.write_text(as_text([*rows[:2], [], ["", ""], *rows[2:]], delimiter=";"), encoding="utf-8")
    assert [row.confidence for row in read_sheet(path).rows] == [0.8, 0.5, 1.0]


def test_other_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "x.csv"
    assert "is empty" in refusal(path, "\n\n")
    assert "no column 'id'" in refusal(path, "path,cluster,confidence\na,1,0.5\n")
    assert "no rows" in refusal(path, "id,cluster,confidence,answer,audit\n")
    assert "workbook" in refusal(path, b"PK\x03\x04...")
    assert "cannot be read as CSV" in refusal(path, b"id,answer\n" + b"x" * 200_000)
    os.truncate(path, 1 << 30)
    with pytest.raises(UserError, match="larger than any audit"):
        read_sheet(path)
    with pytest.raises(UserError, match="cannot read"):
        read_sheet(tmp_path / "absent.csv")
    with pytest.raises(UserError, match=r"cannot read .*audit\.csv"):
        read_sheet(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (0, "r5-0000", "does not fit cluster 2"),
        (0, "5", "does not fit"),
        (2, "1", "does not fit cluster 1"),
        (2, "", "expected a cluster number"),
        (4, "sure", "expected a cluster number"),
        (4, "nan", "confidence from 0 to 1"),
        (6, "", "N of M images"),
    ],
)
def test_edited_rows_are_named(tmp_path, lines, column, value, reason):
    lines[1][column] = value
    message = refusal(tmp_path / "x.csv", as_text(lines))
    assert reason in message
    assert "line 2" in message


def test_a_row_that_comes_twice_and_rows_of_two_audits_are_refused(tmp_path, table, lines):
    assert "twice" in refusal(tmp_path / "x.csv", as_text([*lines, lines[1]]))
    other = build_sheet(table, np.array([1, 3]), "photos")
    assert "2 audits" in refusal(tmp_path / "x.csv", as_text([*lines, *other[1:]]))

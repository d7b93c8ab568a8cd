"""audit.csv: the drawn images with a column for the answers, as it is written and as people return it."""

import csv
import io
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.atomic import has_content, unescape_cell
from cdc_plugin.errors import DataError, shorten

FILE = "audit.csv"
LARGEST = 1 << 26  # bytes; an audit has at most a thousand lines
NEEDED = ("id", "cluster", "confidence", "answer", "audit")
DELIMITERS = ",;\t"
TRUE_WORDS = {"1", "true", "wahr", "yes"}
AGAIN = "write a new audit with cdc-predict --audit"


@dataclass(frozen=True)
class AuditRow:
    """One drawn image; ``selected`` is None where nothing was selected, ``answer`` is as it was typed."""

    id: str
    cluster: int
    confidence: float
    selected: bool | None
    answer: str


@dataclass(frozen=True)
class Sheet:
    """The returned rows, how many were drawn, and from how many images."""

    rows: list[AuditRow]
    drawn: int
    image_count: int
    source: str
    noun: str = "image"


def build_sheet(table: np.recarray, rows: NDArray[np.int64], source: str, noun: str = "image") -> list[list[str]]:
    """Return a header and one line per drawn row of the table, in that order, with an empty answer."""
    columns = table.dtype.names or ()
    name = "path" if "path" in columns else "index"
    flags = ["selected"] if "selected" in columns else []
    # In every line, so that the file alone can be passed on.
    audit = f"{len(rows)} of {len(table)} {noun}s; {' '.join(source.split())}"
    lines = [["id", name, "cluster", "answer", "confidence", *flags, "audit"]]
    for row in rows.tolist():
        entry, cluster = table[row], int(table["cluster"][row])
        row_id = _build_id(row, cluster, len(rows), len(table))
        values = [str(int(entry[flag])) for flag in flags]
        lines.append([row_id, str(entry[name]), str(cluster), "", f"{entry['confidence']:.6f}", *values, audit])
    return lines


def read_sheet(path: Path) -> Sheet:
    """Read the file as cdc-predict, the page or a spreadsheet wrote it, with any separator, line end and encoding."""
    header, lines = _read_cells(path)
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise DataError(
            f"{path} is not an audit: it has no column {missing[0]!r} (found {shorten(header)}); give the "
            f"{FILE} that cdc-predict --audit wrote"
        )
    if not lines:
        raise DataError(f"{path} has a header but no rows; {AGAIN}")
    rows: dict[str, AuditRow] = {}
    audits = {}
    for number, cells in lines:
        entry, where = dict(zip(header, cells, strict=False)), f"{path}, line {number}"
        totals = re.match(r"\s*(\d+) of (\d+) (image|sample)s", entry["audit"])
        if totals is None:
            raise DataError(
                f"{where}: expected 'N of M images' in the column 'audit', found {entry['audit'][:40]!r}; change "
                "nothing but the answers"
            )
        drawn, image_count, noun = int(totals[1]), int(totals[2]), totals[3]
        audits[drawn, image_count, noun] = entry["audit"].partition(";")[2].strip()
        row = _parse_row(entry, drawn, image_count, where)
        if row.id in rows:
            raise DataError(f"{where}: the id {row.id} occurs twice; keep one row for each of them")
        rows[row.id] = row
    if len(audits) > 1:
        raise DataError(f"{path} holds rows of {len(audits)} audits; give the rows of one")
    return Sheet(list(rows.values()), drawn, image_count, audits[drawn, image_count, noun], noun)


def _parse_row(entry: dict[str, str], drawn: int, image_count: int, where: str) -> AuditRow:
    row_id = entry["id"].strip()
    try:
        cluster, confidence = int(entry["cluster"]), float(entry["confidence"].replace(",", "."))
        in_range = cluster >= 0 and 0 <= confidence <= 1.001
    except ValueError:
        in_range = False
    if not in_range:
        raise DataError(
            f"{where}: expected a cluster number and a confidence from 0 to 1, found {shorten(entry['cluster'])} "
            f"and {shorten(entry['confidence'])}; change nothing but the answers"
        )
    number = re.fullmatch(r"r(\d+)-[0-9a-f]{4}", row_id)
    if number is None or row_id != _build_id(int(number.group(1)), cluster, drawn, image_count):
        raise DataError(
            f"{where}: the id {row_id[:40]!r} does not fit cluster {cluster} of this audit; one of them was edited: "
            f"change nothing but the answers, or {AGAIN}"
        )
    selected = entry["selected"].strip().lower() in TRUE_WORDS if "selected" in entry else None
    return AuditRow(row_id, cluster, min(confidence, 1.0), selected, entry["answer"].strip())


def _build_id(row: int, cluster: int, drawn: int, image_count: int) -> str:
    """Return the row number with a checksum; it starts with a letter, or a spreadsheet might read it as a date."""
    checksum = zlib.crc32(f"{row} {cluster} {drawn} {image_count}".encode()) & 0xFFFF
    return f"r{row}-{checksum:04x}"


def _read_cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the column names, and every non-empty line with its number."""
    file = path / FILE if path.is_dir() else path
    try:
        if file.stat().st_size > LARGEST:
            raise DataError(f"{file} is larger than any audit, {LARGEST >> 20} MB; give the {FILE} of an audit")
        if not has_content(file):
            raise DataError(f"{file} is empty or no regular file; give the {FILE} of an audit")
        text = _decode(file.read_bytes(), path)
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror or error}); give the {FILE} of an audit") from error
    first = text.lstrip().partition("\n")[0]
    delimiter = max(DELIMITERS, key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); give the {FILE} of an audit") from error
    if not lines:
        raise DataError(f"{path} is empty; {AGAIN}")
    header = [cell.strip().lower() for cell in lines[0][1]]
    # A spreadsheet may drop empty cells at the end of a line.
    empty = [""] * len(header)
    return header, [(number, [*map(unescape_cell, cells), *empty[len(cells) :]]) for number, cells in lines[1:]]


def _decode(data: bytes, path: Path) -> str:
    if data.startswith((b"PK", b"\xd0\xcf\x11\xe0")):
        raise DataError(f"{path} is a workbook; save it as CSV in the spreadsheet program and give that file")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    # Only ids, numbers and answers matter here; a name or class in another encoding keeps apart what differs.
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1").removeprefix("\xef\xbb\xbf")

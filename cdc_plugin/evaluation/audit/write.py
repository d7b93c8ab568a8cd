"""The folder of an audit: audit.csv, and audit.html with every drawn image beside typical ones of its cluster."""

import base64
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.atomic import escape_cell, join_csv, write_text
from cdc_plugin.errors import ConfigError, OutputError
from cdc_plugin.evaluation.audit.sample import draw_rows
from cdc_plugin.evaluation.audit.sheet import FILE, build_sheet

PAGE = "audit.html"
MOST = 1000  # more would make the page too large to send, and nobody answers them
TEMPLATE = Path(__file__).with_name("page.html")
# Bytes of all pictures of a kind; a third more as base64, so that the page stays below 8 MB.
DRAWN_BUDGET, TYPICAL_BUDGET = 3_300_000, 2_300_000
DRAWN_SIDE, TYPICAL_SIDE, SMALLEST_SIDE = 224, 112, 32
MANY_CLUSTERS = 40
BLOCK = 512  # images that are in memory at once; each block may read a packed file from its start

# From n rows of a table to their pixels (n, S, S, 3); None for a sample without a picture.
Read = Callable[[NDArray[np.int64]], Iterable[NDArray[np.uint8] | None]]


def check_audit(folder: Path, count: int, overwrite: bool) -> None:
    """Refuse what cannot be written before anything is computed, and never overwrite answers by accident."""
    if not 1 <= count <= MOST:
        raise ConfigError(f"--audit takes 1 to {MOST} images, found {count}; 100 give the accuracy to within 10 points")
    blocking = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise OutputError(f"--out {folder} is a file or lies in one; give the path of a folder")
    present = [path for path in (folder / FILE, folder / PAGE) if path.exists()]
    if present and not overwrite:
        raise OutputError(
            f"{present[0]} already exists, perhaps with answers; give another --out, or --overwrite to replace it"
        )


def write_audit(
    folder: Path,
    table: np.recarray,
    count: int,
    seed: int,
    read: Read,
    source: str,
    overwrite: bool,
    noun: str = "image",
) -> list[Path]:
    """Draw ``count`` images of a table of predictions, write sheet and page, and return their paths."""
    check_audit(folder, count, overwrite)
    selected = table["selected"] if "selected" in (table.dtype.names or ()) else None
    rows = draw_rows(table["confidence"], selected, count, seed)
    lines = build_sheet(table, rows, source, noun)
    page = _render_page(table, rows, lines, read, source, noun)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create the folder {folder}: {error.strerror}; give another --out") from error
    contents = {folder / FILE: join_csv(lines), folder / PAGE: page}
    for path, content in contents.items():
        write_text(path, content)
    return list(contents)


def _render_page(
    table: np.recarray, rows: NDArray[np.int64], lines: list[list[str]], read: Read, source: str, noun: str
) -> str:
    """Return the page, in one file that loads nothing; it saves the lines of audit.csv with the answers."""
    from jinja2 import Environment, StrictUndefined

    asked = np.unique(table["cluster"][rows])
    shown = 8 if len(asked) <= MANY_CLUSTERS else 5
    # One more than shown: an image is not compared with itself.
    typical = {int(cluster): find_typical_rows(table, int(cluster), shown + 1) for cluster in asked}
    pictures = _encode_pictures(np.concatenate(list(typical.values())), read, TYPICAL_BUDGET, TYPICAL_SIDE)
    drawn_pictures = _encode_pictures(rows, read, DRAWN_BUDGET, DRAWN_SIDE)
    questions = []
    for row, cluster in zip(rows.tolist(), table["cluster"][rows].tolist(), strict=True):
        others = [other for other in typical[cluster] if other != row]
        name = str(table[row][0])
        questions.append({"cluster": cluster, "picture": drawn_pictures[row], "name": name, "typical": others})
    names = {row: str(table[row][0]) for row in pictures}  # shown where there is no picture
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    escaped = [list(map(escape_cell, line)) for line in lines]
    return template.render(
        source=source.encode("utf-8", "replace").decode("utf-8"),
        images=len(table),
        noun=noun,
        content={
            "shown": shown,
            "lines": escaped,
            "questions": questions,
            "pictures": pictures,
            "names": names,
        },
    )


def find_typical_rows(table: np.recarray, cluster: int, count: int) -> list[int]:
    """Return the rows of a cluster with the highest confidence, highest first."""
    members = np.flatnonzero(table["cluster"] == cluster)
    order = np.argsort(-table["confidence"][members], kind="stable")
    return members[order[:count]].tolist()


def _encode_pictures(rows: NDArray[np.int64], read: Read, budget: int, largest: int) -> dict[int, str]:
    """Return a data URI per row, empty without a picture; the more rows, the smaller the pictures."""
    # Late: this imports torch, and refusals need none.
    from cdc_plugin.report.gallery import BYTES_PER_PIXEL, HEADER_BYTES, ThumbnailSize, encode

    most_bytes = budget // len(rows)
    side = int(np.sqrt(max(most_bytes - HEADER_BYTES, 0) / BYTES_PER_PIXEL))
    size = ThumbnailSize(min(max(side, SMALLEST_SIDE), largest), most_bytes)
    pictures = {}
    for start in range(0, len(rows), BLOCK):
        block = np.sort(rows[start : start + BLOCK])
        for row, pixels in zip(block.tolist(), read(block), strict=True):
            data = "" if pixels is None else base64.b64encode(encode(pixels, size)).decode("ascii")
            pictures[row] = data and f"data:image/jpeg;base64,{data}"
    return pictures

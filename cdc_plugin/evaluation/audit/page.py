"""audit.html: every drawn image beside typical ones of its cluster, in one file that loads nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.report.gallery import BYTES_PER_PIXEL, HEADER_BYTES, ThumbnailSize, encode

TEMPLATE = Path(__file__).with_name("page.html")
# Bytes of all pictures of a kind; a third more as base64, so that the page stays below 8 MB.
DRAWN_BUDGET, TYPICAL_BUDGET = 3_300_000, 2_300_000
DRAWN_SIDE, TYPICAL_SIDE, SMALLEST_SIDE = 224, 112, 32
MANY_CLUSTERS = 40
BLOCK = 512  # images that are in memory at once; each block may read a packed file from its start

Read = Callable[[NDArray[np.int64]], NDArray[np.uint8]]


def render_page(table: np.recarray, rows: NDArray[np.int64], lines: list[list[str]], read: Read, source: str) -> str:
    """Return the page as text.

    Args:
        rows: the drawn rows of the table, in the order of the questions.
        lines: header and lines of audit.csv for these rows; the page saves them with the answers.
        read: returns the pixels (n, S, S, 3) of n rows.
    """
    from jinja2 import Environment, StrictUndefined

    asked = np.unique(table["cluster"][rows])
    shown = 8 if len(asked) <= MANY_CLUSTERS else 5
    # One more than shown: an image is not compared with itself.
    typical = {int(cluster): find_typical_rows(table, int(cluster), shown + 1) for cluster in asked}
    typical_pictures = _encode_pictures(np.concatenate(list(typical.values())), read, TYPICAL_BUDGET, TYPICAL_SIDE)
    drawn_pictures = _encode_pictures(rows, read, DRAWN_BUDGET, DRAWN_SIDE)
    questions = [
        {
            "cluster": cluster,
            "picture": drawn_pictures[row],
            "typical": [other for other in typical[cluster] if other != row],
        }
        for row, cluster in zip(rows.tolist(), table["cluster"][rows].tolist(), strict=True)
    ]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        source=source.encode("utf-8", "replace").decode("utf-8"),
        images=len(table),
        content={"shown": shown, "lines": lines, "questions": questions, "pictures": typical_pictures},
    )


def find_typical_rows(table: np.recarray, cluster: int, count: int) -> list[int]:
    """Return the rows of a cluster with the highest confidence, highest first."""
    members = np.flatnonzero(table["cluster"] == cluster)
    order = np.argsort(-table["confidence"][members], kind="stable")
    return members[order[:count]].tolist()


def _encode_pictures(rows: NDArray[np.int64], read: Read, budget: int, largest: int) -> dict[int, str]:
    """Return a data URI per row; the more rows, the smaller the pictures."""
    most_bytes = budget // len(rows)
    side = int(np.sqrt(max(most_bytes - HEADER_BYTES, 0) / BYTES_PER_PIXEL))
    size = ThumbnailSize(min(max(side, SMALLEST_SIDE), largest), most_bytes)
    pictures = {}
    for start in range(0, len(rows), BLOCK):
        block = np.sort(rows[start : start + BLOCK])
        for row, pixels in zip(block.tolist(), read(block), strict=True):
            pictures[row] = "data:image/jpeg;base64," + base64.b64encode(encode(pixels, size)).decode("ascii")
    return pictures

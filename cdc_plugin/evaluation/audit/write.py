"""The folder of an audit: audit.csv and audit.html, the page on which the images are answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.audit.sample import draw_rows
from cdc_plugin.evaluation.audit.sheet import FILE, sheet_bytes, sheet_rows

PAGE = "audit.html"
MOST = 1000  # more make a page too large to send, and nobody answers them


def check_audit(folder: Path, count: int, overwrite: bool) -> None:
    """Refuse what cannot be written before anything is computed; no answers are lost by accident."""
    if not 1 <= count <= MOST:
        raise UserError(f"--audit takes 1 to {MOST} images; found {count}; 100 tell the accuracy to within 10 points")
    blocking = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise UserError(f"--out {folder} is or lies in a file; an audit takes a folder: give the path of one")
    present = [path for path in (folder / FILE, folder / PAGE) if path.exists()]
    if present and not overwrite:
        raise UserError(
            f"{present[0]} is already there, perhaps with answers; give another --out, or --overwrite to replace it"
        )


def write_audit(
    folder: Path,
    table: np.recarray,
    count: int,
    seed: int,
    read: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    source: str,
    overwrite: bool,
) -> list[Path]:
    """Draw ``count`` images of a table of predictions and write what it takes to answer them.

    Args:
        read: gives the pixels (n, S, S, 3) of n rows of the table.
        source: what was predicted, by which model; shown on the page and kept in the file.

    Returns:
        The files that were written.
    """
    from cdc_plugin.evaluation.audit.page import (
        audit_page,  # late, as below: torch comes with it, and refusals need none
    )

    check_audit(folder, count, overwrite)
    selected = table["selected"] if "selected" in (table.dtype.names or ()) else None
    rows = draw_rows(table["confidence"], selected, count, seed)
    lines = sheet_rows(table, rows, source)
    contents = [sheet_bytes(lines), audit_page(table, rows, lines, read, source).encode("utf-8", "replace")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; give another --out") from error
    paths = [folder / FILE, folder / PAGE]
    for path, content in zip(paths, contents, strict=True):
        _write(path, content)
    return paths


def _write(path: Path, content: bytes) -> None:
    from cdc_plugin.data.atomic import write_atomically

    write_atomically(path, lambda temporary: temporary.write_bytes(content))

"""The folder of an audit: audit.csv and audit.html, the page on which people answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.errors import ConfigError, OutputError
from cdc_plugin.evaluation.audit.sample import draw_rows
from cdc_plugin.evaluation.audit.sheet import FILE, build_sheet, encode_sheet

PAGE = "audit.html"
MOST = 1000  # more would make the page too large to send, and nobody answers them


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
    read: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    source: str,
    overwrite: bool,
) -> list[Path]:
    """Draw ``count`` images of a table of predictions, write sheet and page, and return their paths.

    Args:
        read: returns the pixels (n, S, S, 3) of n rows of the table.
        source: what was predicted, by which model; shown on the page and kept in the file.
    """
    # Late: these import torch, and refusals need none.
    from cdc_plugin.data.atomic import write_atomically
    from cdc_plugin.evaluation.audit.page import render_page

    check_audit(folder, count, overwrite)
    selected = table["selected"] if "selected" in (table.dtype.names or ()) else None
    rows = draw_rows(table["confidence"], selected, count, seed)
    lines = build_sheet(table, rows, source)
    contents = [encode_sheet(lines), render_page(table, rows, lines, read, source).encode("utf-8", "replace")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create the folder {folder}: {error.strerror}; give another --out") from error
    paths = [folder / FILE, folder / PAGE]
    for path, content in zip(paths, contents, strict=True):
        write_atomically(path, partial(Path.write_bytes, data=content))
    return paths

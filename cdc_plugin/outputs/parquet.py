"""Predictions as a Parquet file with proper types, for pandas, polars, DuckDB and Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cdc_plugin.outputs.names import unicode_name
from cdc_plugin.runtime import write_atomically

FLAGS = ("trusted", "outlier", "selected")


def write(out: Path, table: np.recarray) -> list[Path]:
    r"""Columns as in the CSV: paths are strings (bytes that are not UTF-8 as ``\xff``), an index is int64."""
    import pyarrow
    from pyarrow import parquet

    columns = {name: _column(pyarrow, name, table[name]) for name in table.dtype.names or ()}
    content = pyarrow.table(columns)
    write_atomically(out, lambda temporary: parquet.write_table(content, temporary))
    return [out]


def _column(pyarrow: Any, name: str, values: np.ndarray) -> Any:
    if name == "path":
        return pyarrow.array([unicode_name(value) for value in values.tolist()], pyarrow.string())
    if name == "index":
        return pyarrow.array(values.astype(np.int64), pyarrow.int64())
    if name in FLAGS:
        return pyarrow.array(values.astype(bool), pyarrow.bool_())
    return pyarrow.array(values.astype(np.float32 if values.dtype.kind == "f" else np.int32))

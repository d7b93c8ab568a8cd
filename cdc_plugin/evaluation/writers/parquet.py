"""Predictions as a Parquet file with column types, for pandas, polars, DuckDB and Spark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.evaluation.writers.names import escape_name

ROWS = 131_072  # in a group, at least: small ones are slow to read
FLAGS = ("trusted", "outlier", "selected")


def write(out: Path, tables: Iterable[np.recarray]) -> list[Path]:
    r"""Write the columns of the CSV; paths are strings (bytes that are not UTF-8 as ``\xff``), an index is int64.

    Args:
        tables: at least one, all with the same columns; few are in memory at once.
    """
    import pyarrow
    from pyarrow import parquet

    def write_groups(temporary: Path) -> None:
        contents = (
            pyarrow.table({name: _convert(pyarrow, name, table[name]) for name in table.dtype.names or ()})
            for table in tables
        )
        group = [next(contents)]
        with parquet.ParquetWriter(temporary, group[0].schema) as writer:
            for content in contents:
                if sum(map(len, group)) >= ROWS:
                    writer.write_table(pyarrow.concat_tables(group))
                    group = []
                group.append(content)
            writer.write_table(pyarrow.concat_tables(group))

    write_atomically(out, write_groups)
    return [out]


def _convert(pyarrow: Any, name: str, values: np.ndarray) -> Any:
    if name == "path":
        return pyarrow.array([escape_name(value) for value in values.tolist()], pyarrow.string())
    if name == "index":
        return pyarrow.array(values.astype(np.int64), pyarrow.int64())
    if name in FLAGS:
        return pyarrow.array(values.astype(bool), pyarrow.bool_())
    return pyarrow.array(values.astype(np.float32 if values.dtype.kind == "f" else np.int32))

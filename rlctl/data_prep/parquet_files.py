"""Parquet files, read in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.data_prep.arrow_types import check_names
from rlctl.errors import ConfigError

BATCH_ROWS = 1024  # rows that are in memory as Python objects at a time
_BUFFER = 2**20  # bytes of a column that are read at a time


@contextmanager
def readable_parquet(path: Path, hint: str | None = None) -> Iterator[Any]:
    """Open a parquet file to stream it. Raises ConfigError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, buffer_size=_BUFFER)
        check_names(file.schema_arrow, path)
        yield file
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"not a readable parquet file: {str(error).splitlines()[0]}",
            where=str(path),
            hint=hint,
        ) from error


def stream_parquet(file: Any, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of an open parquet file as Arrow batches."""
    for group in range(file.num_row_groups):  # in one call, pyarrow 26 keeps memory of each group
        yield from file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)

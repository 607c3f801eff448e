"""Rows of prompts as those of a data file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.recipes import schema
from rlctl.runtime.data.row_table import Rows


def rows_of(rows: Sequence[PromptRow]) -> Rows:
    """Write the rows to a file and load it."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        write_rows(file, rows)
        keys = SimpleNamespace(prompt_key="prompt", reward_fn_key="data_source", image_key="images")
        return Rows.load(file, cast(schema.Data, keys))

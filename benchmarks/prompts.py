"""Prompts of a benchmark: read from a file, as those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.recipes import schema
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import encode_prompt, tokenizer_of


def prompt_set(config: schema.Config, rows: Sequence[PromptRow]) -> PromptSet:
    """Return the prompts of `rows` in tokens of the actor's model."""
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    with TemporaryDirectory() as folder:
        write_rows(path := Path(folder) / "rows.parquet", rows)
        table = Rows.load(path, config.data)
    return PromptSet(table, lambda row: encode_prompt(tokenizer, row.prompt))

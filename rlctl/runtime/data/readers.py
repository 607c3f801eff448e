"""Data files in other formats: a reader makes rows of a file, which are read instead of it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow, existing_file, write_rows
from rlctl.errors import ConfigError
from rlctl.plugins import load_with_params
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Ragged, Scored
from rlctl.storage import cache_folder

LOG = logging.getLogger(__name__)

_IDS = "input_ids"
_MASK = "loss_mask"


@dataclass(frozen=True)
class Source:
    """File that a reader reads, and what it may need: tokenizer and section `data`."""

    path: Path
    tokenizer: PreTrainedTokenizerBase
    data: schema.Data
    skips: bool = False  # leave out and count rows that cannot be used: data.skip_invalid

    def tokens(self, ids: Sequence[int], mask: Sequence[int], shown: str) -> PromptRow | None:
        """Return a row of N tokens, of which SFT learns those whose mask (N,) is 1.

        `shown` names the row. None: it has more than max_prompt_length + max_response_length
        tokens, and such rows are left out. Raises ValueError for tokens that cannot be learned.
        """
        data = self.data
        limit = self.data.max_prompt_length + self.data.max_response_length
        ids = [*map(int, ids)]
        mask = [*map(int, mask)]
        if len(ids) != len(mask) or not set(mask) <= {0, 1}:
            raise ValueError(f"{len(ids)} tokens need as many numbers 0 or 1 in their mask")
        if len(ids) > limit and data.truncation == "right":
            ids = ids[:limit]
            mask = mask[:limit]
        if len(ids) > limit:
            if data.filter_overlong_prompts and data.truncation == "error":
                return None
            raise ValueError(
                f"the row has {len(ids)} tokens, more than data.max_prompt_length + "
                f"data.max_response_length = {limit}: data.truncation=right cuts such rows"
            )
        if 1 not in mask[1:]:
            raise ValueError(f"no token of {len(ids)} is to be learned")
        chat = [{"role": "user", "content": shown}]
        name = self.path.name.partition(".")[0]
        return PromptRow(name, chat, "", extra_info={_IDS: ids, _MASK: mask})


Reader = Callable[..., Iterator[PromptRow | None]]  # (source, params)


def read_files(
    paths: Sequence[Path], data: schema.Data, tokenizer: PreTrainedTokenizerBase, skips: bool
) -> list[Path]:
    """Return files of the rows that the reader `data.reader` makes of each of `paths`."""
    reader = load_reader(data)
    return [_read(reader, Source(existing_file(path), tokenizer, data, skips)) for path in paths]


def load_reader(data: schema.Data) -> Reader:
    """Return the reader `data.reader` with its settings."""
    return load_with_params("readers", str(data.reader), data.reader_params, "data.reader_params")


def reader_rows(reader: Reader, source: Source) -> Iterator[PromptRow | None]:
    """Return the rows that a reader makes of a file; None for one too long."""
    made = reader(source)
    check_result(reader, isinstance(made, Iterator), made, "an iterator of rows")
    return made


def learned_tokens(row: PromptRow) -> tuple[list[int], list[int]] | None:
    """Return ids and mask of a row of tokens, up to the last one that is learned.

    None for a row without tokens: it has a prompt.
    """
    ids = row.extra_info.get(_IDS)
    mask = row.extra_info.get(_MASK)
    if ids is None or mask is None:
        return None
    end = len(mask) - mask[::-1].index(1)
    return ids[:end], mask[:end]


def _read(reader: Reader, source: Source) -> Path:
    path = source.path
    data = source.data
    rows = list(reader_rows(reader, source))
    usable = [row for row in rows if row is not None]
    if len(usable) < len(rows):
        LOG.warning("%s: %d too long rows left out", path, len(rows) - len(usable))
    if not usable:
        raise ConfigError("the reader makes no rows of the file", where=str(path))
    settings = f"{path.resolve()} {data.reader} {data.reader_params}"
    name = f"{path.stem}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.parquet"
    target = cache_folder() / "read" / name
    write_rows(target, usable)
    return target


def to_scored(prompts: Prompts) -> Scored:
    """Return the token rows of readers as B scored responses: from the first learned token on."""
    parts: list[tuple[list[int], list[int], list[int]]] = []
    for row in prompts.rows:
        tokens = learned_tokens(row)
        if tokens is None:
            raise ConfigError(
                f"rows of {row.data_source!r} have no {_IDS} and {_MASK}",
                where="data.reader",
                hint="a reader for sft makes its rows with source.tokens(ids, mask, name)",
            )
        ids, mask = tokens
        start = mask.index(1, 1)
        parts.append((ids[:start], ids[start:], mask[start:]))
    heads, responses, masks = zip(*parts, strict=True)
    response_ids = Ragged.from_rows(list(responses), dtype=torch.int64)
    values = torch.tensor([value for mask in masks for value in mask], dtype=torch.float32)
    return Scored(
        prompt_ids=Ragged.from_rows(list(heads), dtype=torch.int64),
        group=prompts.group,
        rows=prompts.rows,
        images=prompts.images,
        response_ids=response_ids,
        response_mask=response_ids.like(values),
        rollout_log_probs=response_ids.like(torch.zeros(len(values))),
        finish=["stop"] * len(prompts),
        scores=torch.ones(len(prompts)),
        components={},
        failed=torch.zeros(len(prompts), dtype=torch.bool),
    )

"""Batches of prompts from data files.

Prompts form an endless stream, one epoch after another in a different order. The order is a
function of the seed and the epoch, so there is no state to save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow, read_rows
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.data.tokenizer import encode_prompt


@dataclass(frozen=True)
class PromptSet:
    """Rows of the data files with their token ids, after filtering or truncation."""

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    num_dropped: int  # rows dropped as over-long

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        data: schema.Data,
        tokenizer: PreTrainedTokenizerBase,
        max_samples: int,
    ) -> PromptSet:
        """Read parquet or JSONL files and tokenize prompts with the model's chat template.

        Reads at most `max_samples` rows (-1: all). Prompts longer than `data.max_prompt_length` are
        dropped if `data.filter_overlong_prompts`, else handled by `data.truncation`. Raises
        ConfigError if no prompt remains, or for an over-long prompt with `truncation=error`.
        """
        rows = [
            row
            for file in files
            for row in read_rows(file, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key)
        ]
        if max_samples >= 0:
            rows = rows[:max_samples]
        kept, ids, dropped = [], [], 0
        for number, row in enumerate(rows):
            prompt = encode_prompt(tokenizer, row.prompt, **data.apply_chat_template_kwargs)
            if len(prompt) > data.max_prompt_length:
                if data.filter_overlong_prompts:
                    dropped += 1
                    continue
                prompt = _truncate(prompt, data, f"{', '.join(files)}: row {number}")
            kept.append(row)
            ids.append(prompt)
        if not kept:
            raise ConfigError(
                f"no prompt is left: {dropped} of {len(rows)} are longer than "
                f"data.max_prompt_length={data.max_prompt_length} tokens",
                where=", ".join(files),
                hint="set a larger data.max_prompt_length",
            )
        return cls(kept, ids, dropped)

    def batch(self, index: Sequence[int]) -> Prompts:
        """Return the N prompts at `index` as a batch with groups 0 … N−1."""
        ids = Ragged.from_rows([self.prompt_ids[i] for i in index], dtype=torch.int64)
        return Prompts(
            prompt_ids=ids, group=torch.arange(len(index)), rows=[self.rows[i] for i in index]
        )

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.rows)


@dataclass(frozen=True)
class PromptLoader:
    """Stream of prompts in batches of `batch_size`.

    Steps count from 1; epochs and positions in the stream from 0. An epoch omits the last prompts
    that do not fill a batch.
    """

    prompts: PromptSet
    batch_size: int
    sampler: Callable[[int, int, int], Tensor]  # see the module `samplers`
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in an epoch."""
        return len(self.prompts) // self.batch_size

    def epoch_of(self, position: int) -> int:
        """Return the epoch of a position in the stream."""
        return position // (self.steps_per_epoch * self.batch_size)

    def batch_at(self, step: int) -> Prompts:
        """Return the prompts of `step` (from 1); the same for every call."""
        return self.at(range((step - 1) * self.batch_size, step * self.batch_size))

    def at(self, positions: Sequence[int]) -> Prompts:
        """Return the N prompts at `positions` of the stream as a batch with groups 0 … N−1."""
        orders = {
            epoch: self.sampler(len(self.prompts), epoch, self.seed)
            for epoch in {self.epoch_of(position) for position in positions}
        }
        per_epoch = self.steps_per_epoch * self.batch_size
        return self.prompts.batch(
            [int(orders[self.epoch_of(each)][each % per_epoch]) for each in positions]
        )


def _truncate(ids: list[int], data: schema.Data, where: str) -> list[int]:
    """Shorten a prompt to `data.max_prompt_length` by `data.truncation`, or raise ConfigError."""
    limit = data.max_prompt_length
    match data.truncation:
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
        case _:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens is longer than data.max_prompt_length={limit}",
                where=where,
                hint="set a larger data.max_prompt_length, data.filter_overlong_prompts=true or "
                "data.truncation=left|right|middle",
            )

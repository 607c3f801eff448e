"""From rows to batches of prompts. The prompts are an endless stream, epoch after epoch in another order, which is a function of the seed
alone: there is no state to save."""

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
    """Rows and their token ids, over-long ones dealt with."""

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    num_dropped: int

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        data: schema.Data,
        tokenizer: PreTrainedTokenizerBase,
        max_samples: int,
    ) -> PromptSet:
        """Read parquet (or JSONL) files, at most `max_samples` rows (-1: all), and tokenise with the model's chat template.

        A prompt longer than `data.max_prompt_length` is dropped and counted (`filter_overlong_prompts`), or `data.truncation` decides.
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
                f"no prompt is left: {dropped} of {len(rows)} are longer than data.max_prompt_length={data.max_prompt_length} tokens",
                where=", ".join(files),
                hint="a larger data.max_prompt_length",
            )
        return cls(kept, ids, dropped)

    def batch(self, index: Sequence[int]) -> Prompts:
        """The prompts at `index`, as a batch whose groups count from 0."""
        ids = Ragged.from_rows([self.prompt_ids[i] for i in index], dtype=torch.int64)
        return Prompts(
            prompt_ids=ids, group=torch.arange(len(index)), rows=[self.rows[i] for i in index]
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class PromptLoader:
    """Steps count from 1, epochs and places in the stream of prompts from 0; the last rows of an epoch that do not fill a batch are left
    out of that epoch."""

    prompts: PromptSet
    batch_size: int
    sampler: Callable[[int, int, int], Tensor]  # see `samplers`
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.batch_size

    def epoch_of(self, rank_info: int) -> int:
        return rank_info // (self.steps_per_epoch * self.batch_size)

    def batch_at(self, step: int) -> Prompts:
        """The prompts of one step, the same ones whenever it is asked for."""
        return self.at(range((step - 1) * self.batch_size, step * self.batch_size))

    def at(self, places: Sequence[int]) -> Prompts:
        """The prompts at these places of the stream, as a batch whose groups count from 0."""
        orders = {
            epoch: self.sampler(len(self.prompts), epoch, self.seed)
            for epoch in {self.epoch_of(rank_info) for rank_info in places}
        }
        an_epoch = self.steps_per_epoch * self.batch_size
        return self.prompts.batch(
            [int(orders[self.epoch_of(rank_info)][rank_info % an_epoch]) for rank_info in places]
        )


def _truncate(ids: list[int], data: schema.Data, where: str) -> list[int]:
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
                hint="a larger data.max_prompt_length, data.filter_overlong_prompts=true, or data.truncation=left|right|middle",
            )

"""Responses that the data gives, in the place of sampled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Ragged, Scored
from rlctl.runtime.data.tokenizer import tokenizer_of


@dataclass(frozen=True)
class GivenResponses:
    """Tokenized texts with the end-of-sequence token, truncated to `max_response_length`."""

    model: schema.Model
    max_response_length: int

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.model)

    def to_scored(self, prompts: Prompts, texts: Sequence[str], scores: Tensor) -> Scored:
        """Return B responses with the `texts` (B) and `scores` (B,) to as many prompts."""
        ids = Ragged.from_rows([self._ids(text) for text in texts], dtype=torch.int64)
        ones, zeros = torch.ones(len(ids.values)), torch.zeros(len(ids.values))
        return prompts.grow(
            Scored,
            response_ids=ids,
            response_mask=ids.like(ones),
            rollout_log_probs=ids.like(zeros),
            finish=["stop"] * len(prompts),
            scores=scores,
            components={},
            failed=torch.zeros(len(prompts), dtype=torch.bool),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id][: self.max_response_length]

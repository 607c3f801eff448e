"""Conversations in the words of a model that did not write them: rendered again, and tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.data.tokenizer import Chat, render_prompt, tokenizer_of
from rlctl.storage import local


@dataclass(frozen=True)
class Conversations:
    """Renderer of conversations with the chat template of a reward model."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None  # in tokens; a longer conversation loses its start

    @classmethod
    def from_config(cls, settings: schema.RewardModel) -> Conversations:
        """Load the tokenizer; without `max_length`, the limit is the model's context."""
        model = settings.model
        config = AutoConfig.from_pretrained(
            local(model.path), trust_remote_code=model.trust_remote_code, **model.override_config
        )
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(tokenizer_of(model), settings.max_length or context)

    def encode(self, chat: Chat) -> list[int]:
        """Return the tokens of a conversation that ends with a response, not truncated.

        Raises ConfigError if the template rejects it.
        """
        text = render_prompt(self.tokenizer, chat, add_generation_prompt=False)
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def is_too_long(self, ids: Sequence[int]) -> bool:
        """Return whether the start of a conversation is cut off."""
        return self.max_length is not None and len(ids) > self.max_length

    def to_rollouts(self, owner: Prompts, ids: Sequence[list[int]]) -> Rollouts:
        """Return the B conversations `ids` as the rows of `owner`.

        A response starts where a conversation differs from the prompt of its row; it has at least
        the last token.
        """
        parts = [
            self._divide(prompt.tolist(), each)
            for prompt, each in zip(owner.prompt_ids.rows(), ids, strict=True)
        ]
        responses = Ragged.from_rows([response for _, response in parts], dtype=torch.int64)
        return Rollouts(
            prompt_ids=Ragged.from_rows([prompt for prompt, _ in parts], dtype=torch.int64),
            group=owner.group,
            rows=owner.rows,
            response_ids=responses,
            response_mask=responses.like(torch.ones(len(responses.values))),
            rollout_log_probs=responses.like(torch.zeros(len(responses.values))),
            finish=["stop"] * len(owner),
        )

    def _divide(self, prompt: list[int], ids: list[int]) -> tuple[list[int], list[int]]:
        """Cut a conversation at its start, and divide it into two parts with tokens."""
        pairs = enumerate(zip(prompt, ids, strict=False))
        start = next((i for i, (one, other) in pairs if one != other), len(prompt))
        start = min(start, len(ids) - 1)
        cut = max(0, len(ids) - self.max_length) if self.max_length is not None else 0
        start, kept = max(1, start - cut), ids[cut:]
        return kept[:start], kept[start:]

"""Conversations in the words of a model that did not write them: rendered again, and tokenized.

`Pairs` reads those of preference pairs for a reward model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from rlctl.data_prep.images import content_of
from rlctl.data_prep.message_parts import PLACEHOLDER
from rlctl.data_prep.row_fields import RowField, read_field, read_text
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.base.image_processor import Images, image_token
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import (
    Chat,
    encode_text,
    render_prompt,
    tokenizer_of,
    with_response,
)
from rlctl.storage import local

MARGIN = RowField("extra_info.margin", "algorithm.params.margin", is_number=True)


def text_field(row: PromptRow, dotted: str, key: str) -> str:
    """Return the text at `dotted`, such as `extra_info.answer`, which the config `key` names.

    Raises ConfigError if it is missing, null, empty, or neither a text nor a chat.
    """
    return read_text(row, RowField(dotted, key))


def pair_fields(data: schema.Data) -> tuple[RowField, RowField]:
    """Return the fields of the chosen and the rejected response of a row."""
    chosen = RowField(data.chosen_key, "data.chosen_key")
    return chosen, RowField(data.rejected_key, "data.rejected_key")


def pair_texts(row: PromptRow, data: schema.Data) -> list[str]:
    """Return the chosen and the rejected response of a row.

    Raises ConfigError if one is missing.
    """
    return [read_text(row, field) for field in pair_fields(data)]


def _without_references(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text refers to no image if an assistant wrote it."""
    text = message["content"]
    if message["role"] != "assistant" or PLACEHOLDER not in text:
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


@dataclass(frozen=True)
class Conversations:
    """Renderer of conversations with the chat template of a reward model."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None  # in tokens; a longer conversation loses its start, but no image
    model: schema.Model
    config: PretrainedConfig

    @classmethod
    def from_config(cls, settings: schema.RewardModel) -> Conversations:
        """Load the tokenizer; without `max_length`, the limit is the model's context."""
        model = settings.model
        config = AutoConfig.from_pretrained(
            local(model.path), trust_remote_code=model.trust_remote_code, **model.override_config
        )
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(tokenizer_of(model), settings.max_length or context, model, config)

    @cached_property
    def _images(self) -> ImagePrompts:
        return ImagePrompts(self.model, self.tokenizer)

    def encode(self, chat: Chat, images: Images = ()) -> list[int]:
        """Return the tokens of a conversation that ends with a response, not truncated.

        Its text refers to `images`. Raises ConfigError if the template rejects it, or if its images
        do not fit.
        """
        if images:
            chat = list(map(_without_references, chat))
            text = self._images.render(chat, images, add_generation_prompt=False)
        else:
            text = render_prompt(self.tokenizer, chat, add_generation_prompt=False)
        ids = encode_text(self.tokenizer, text)
        if self.max_length is not None and self._end_of_images(ids) >= self.max_length:
            raise ConfigError(
                f"the images of a conversation take {self._end_of_images(ids)} of at most "
                f"{self.max_length} tokens",
                where="reward.reward_model.max_length",
                hint="an image is never cut: a larger max_length, or smaller images",
            )
        return ids

    def _end_of_images(self, ids: Sequence[int]) -> int:
        """Return the position after the last token of an image in a conversation, or 0."""
        if not hasattr(self.config, "vision_config"):
            return 0
        token = image_token(self.config)
        return next((end for end in range(len(ids), 0, -1) if ids[end - 1] == token), 0)

    def is_too_long(self, ids: Sequence[int]) -> bool:
        """Return whether the start of a conversation is cut off."""
        return self.max_length is not None and len(ids) > self.max_length

    def to_rollouts(self, owner: Prompts, ids: Sequence[list[int]]) -> Rollouts:
        """Return the B conversations `ids` as the rows of `owner`.

        A response starts where a conversation differs from the prompt of its row, after all images;
        it has at least the last token.
        """
        parts = [
            self._divide(prompt.tolist(), response)
            for prompt, response in zip(owner.prompt_ids.rows(), ids, strict=True)
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
            images=owner.images,
        )

    def _divide(self, prompt: list[int], ids: list[int]) -> tuple[list[int], list[int]]:
        """Cut a conversation after its images, and divide it into two parts with tokens."""
        pairs = enumerate(zip(prompt, ids, strict=False))
        start = next((i for i, (one, other) in pairs if one != other), len(prompt))
        start = min(start, len(ids) - 1)
        cut = max(0, len(ids) - self.max_length) if self.max_length is not None else 0
        end = self._end_of_images(ids)
        start = max(1, end, start - cut)
        kept = ids[:end] + ids[end + cut :]
        return kept[:start], kept[start:]


@dataclass(frozen=True)
class Pairs:
    """Reader of the pairs in rows."""

    conversations: Conversations
    data: schema.Data

    @classmethod
    def from_config(cls, reward_model: schema.RewardModel, data: schema.Data) -> Pairs:
        """Load the tokenizer of the reward model."""
        return cls(Conversations.from_config(reward_model), data)

    def check(self, rows: Rows) -> None:
        """Raise ConfigError for rows without both texts, or if the template rejects the first."""
        from rlctl.runtime.data.row_checks import check_fields

        check_fields(rows, pair_fields(self.data))
        self.check_template(rows)

    def check_template(self, rows: Sequence[PromptRow]) -> None:
        """Raise ConfigError if the chat template rejects the first of the rows."""
        for row in rows[:1]:
            images = tuple(map(content_of, row.images))
            self.conversations.encode(with_response(row.prompt, ""), images)

    def rollouts(self, prompts: Prompts) -> Rollouts:
        """Return both conversations of each of B rows, the chosen one first: 2·B rows."""
        images = prompts.images or [()] * len(prompts)
        ids = [
            self.conversations.encode(with_response(row.prompt, text), row_images)
            for row, row_images in zip(prompts.rows, images, strict=True)
            for text in pair_texts(row, self.data)
        ]
        return self.conversations.to_rollouts(prompts.repeat(2), ids)

    def margins(self, rows: Sequence[PromptRow]) -> Tensor:
        """Return by how much the chosen response of each row is better: (P,) float64.

        Raises ConfigError for a row without the number `extra_info.margin`.
        """
        values = [read_field(row, MARGIN) for row in rows]
        for row, value in zip(rows, values, strict=True):
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"a row of {row.data_source!r} has no number {MARGIN.path}",
                    where=MARGIN.key,
                    hint="false, or prepare pairs with scores: rlctl prep preferences --help",
                )
        return torch.tensor(values, dtype=torch.float64)

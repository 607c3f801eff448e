"""Preference pairs of a data set as conversations of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.data.fields import pair_texts


@dataclass(frozen=True)
class Pairs:
    """Reader of the pairs in rows."""

    conversations: Conversations
    data: schema.Data

    @classmethod
    def from_config(cls, reward_model: schema.RewardModel, data: schema.Data) -> Pairs:
        """Load the tokenizer of the reward model."""
        return cls(Conversations.from_config(reward_model), data)

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Raise ConfigError for a row without both texts, or if the template rejects the first."""
        for row in rows:
            pair_texts(row, self.data)
        if rows:
            self.conversations.encode([*rows[0].prompt, {"role": "assistant", "content": ""}])

    def rollouts(self, prompts: Prompts) -> Rollouts:
        """Return both conversations of each of B rows, the chosen one first: 2·B rows."""
        ids = [
            self.conversations.encode([*row.prompt, {"role": "assistant", "content": text}])
            for row in prompts.rows
            for text in pair_texts(row, self.data)
        ]
        return self.conversations.to_rollouts(prompts.repeat(2), ids)

    def margins(self, rows: Sequence[PromptRow]) -> Tensor:
        """Return by how much the chosen response of each row is better: (P,) float64.

        Raises ConfigError for a row without the number `extra_info.margin`.
        """
        values = [row.extra_info.get("margin") for row in rows]
        for row, value in zip(rows, values, strict=True):
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"a row of {row.data_source!r} has no number extra_info.margin",
                    where="algorithm.params.margin",
                    hint="false, or prepare pairs with scores: rlctl prep preferences --help",
                )
        return torch.tensor(values, dtype=torch.float64)

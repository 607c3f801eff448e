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
from rlctl.runtime.data.fields import text_field


@dataclass(frozen=True)
class Pairs:
    """Reader of the pairs in rows."""

    conversations: Conversations
    keys: dict[str, str]  # config key -> dotted path of a text: chosen, then rejected

    @classmethod
    def from_config(cls, reward_model: schema.RewardModel, data: schema.Data) -> Pairs:
        """Load the tokenizer of the reward model."""
        keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
        return cls(Conversations.from_config(reward_model), keys)

    def texts(self, row: PromptRow) -> list[str]:
        """Return the chosen and the rejected response. Raises ConfigError if one is missing."""
        return [text_field(row, dotted, key) for key, dotted in self.keys.items()]

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Raise ConfigError for a row without both texts, or if the template rejects the first."""
        for row in rows:
            self.texts(row)
        if rows:
            self.conversations.encode([*rows[0].prompt, {"role": "assistant", "content": ""}])

    def rollouts(self, prompts: Prompts) -> Rollouts:
        """Return both conversations of each of B rows, the chosen one first: 2·B rows."""
        ids = [
            self.conversations.encode([*row.prompt, {"role": "assistant", "content": text}])
            for row in prompts.rows
            for text in self.texts(row)
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

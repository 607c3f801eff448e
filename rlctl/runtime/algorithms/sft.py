"""Supervised fine-tuning as an algorithm: the "answers" are the worked solutions of the data, the loss is their negative log-likelihood.

It runs on the same trainer, workers and validation as everything else; `learn` is one optimizer step a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Loss, Needs
from rlctl.runtime.algorithms.schedule import Schedule
from rlctl.runtime.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.model.causal_lm import PolicyOutputs
from rlctl.runtime.roles import Roles
from rlctl.tracking.metrics import Mean, Metrics, merge


@dataclass(frozen=True)
class SFT:
    """−Σ log π(solution token) / number of solution tokens, the end-of-sequence token included."""

    actor: schema.Actor
    response_key: str
    max_response_length: int
    tokenizer_path: str
    trust_remote_code: bool
    schedule: Schedule

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int) -> Self:
        model = config.actor_rollout_ref.model
        return cls(
            actor=config.actor_rollout_ref.actor,
            response_key=config.data.response_key,
            max_response_length=config.data.max_response_length,
            tokenizer_path=model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            schedule=Schedule.from_config(config.actor_rollout_ref.actor.optim, num_steps),
        )

    @property
    def needs(self) -> Needs:
        """Return the engine, which validation uses to generate responses."""
        return Needs.ENGINE

    @staticmethod
    def unused_keys(config: schema.Config) -> Mapping[str, str]:
        """Return the keys about sampling for training, which SFT does not do."""
        reason = f"algorithm.name is {config.algorithm.name}"
        return {"algorithm.rollout_correction.*": reason, "trainer.mismatch.*": reason}

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:  # noqa: ARG002
        """The data's own solutions, cut at `max_response_length`. Nothing is generated."""
        ids = Ragged.from_rows([self._solution(row) for row in prompts.rows], dtype=torch.int64)
        ones, zeros = torch.ones(len(ids.values)), torch.zeros(len(ids.values))
        return prompts.grow(
            Scored,
            response_ids=ids,
            response_mask=ids.like(ones),
            rollout_log_probs=ids.like(zeros),
            finish=["stop"] * len(prompts),
            scores=torch.ones(len(prompts)),
            components={},
            failed=torch.zeros(len(prompts), dtype=torch.bool),
        )

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        order = torch.arange(len(scored)).split(self.actor.ppo_mini_batch_size)
        return merge(
            [roles.actor.update(batch, self.schedule(step)) for batch in scored.chunk(order)]
        )

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        total = -outputs.log_probs.sum()
        num_tokens = float(len(batch.response_ids.values))
        return Loss(total, num_tokens, {"train/loss": Mean(float(total.detach()), num_tokens)})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_path, self.trust_remote_code)

    def _solution(self, row: PromptRow) -> list[int]:
        text = _at(row, self.response_key)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id][: self.max_response_length]


def _at(row: PromptRow, dotted: str) -> str:
    """The text at `data.response_key`, such as `extra_info.answer`."""
    value: Any = {"extra_info": row.extra_info, "ground_truth": row.ground_truth}
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"data.response_key={dotted!r} is not in a row of {row.data_source!r}",
                hint=f"extra_info has: {', '.join(row.extra_info) or 'nothing'}",
            )
        value = value[part]
    return str(value)

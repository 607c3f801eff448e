"""Supervised fine-tuning: the negative log-likelihood of the data's solutions.

The solutions take the place of sampled responses. Trainer, workers and validation are those of the
other algorithms. `learn` makes one optimizer step per mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.row_fields import RowField, read_text
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import AGGREGATION_KEYS, PPO_KEYS, Loss, Needs, Stateless
from rlctl.runtime.algorithms.lr_schedule import Schedule
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Mean, Metrics, merge
from rlctl.runtime.base.ops import PolicyOutputs, masked_sum
from rlctl.runtime.base.roles import Roles
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
        ones = torch.ones(len(ids.values))
        zeros = torch.zeros(len(ids.values))
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


@dataclass(frozen=True)
class SFT(Stateless):
    """Supervised fine-tuning with the mean negative log-likelihood of the solution tokens.

    The end-of-sequence token is one of them.
    """

    actor: schema.Actor
    solution: RowField | None  # None: a reader gives the tokens
    given: GivenResponses
    schedule: Schedule

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int) -> Self:
        """Build the algorithm; `num_steps` is the length of the learning-rate schedule."""
        solution = None
        if config.data.reader is None:
            solution = RowField(config.data.response_key, "data.response_key")
        return cls(
            actor=config.actor_rollout_ref.actor,
            solution=solution,
            given=GivenResponses(config.actor_rollout_ref.model, config.data.max_response_length),
            schedule=Schedule.from_config(config.actor_rollout_ref.actor.optim, num_steps),
        )

    @property
    def needs(self) -> Needs:
        """The engine: validation generates responses with it."""
        return Needs.ENGINE

    @property
    def row_fields(self) -> Sequence[RowField]:
        """The solution."""
        return () if self.solution is None else (self.solution,)

    has_rewards: ClassVar = False  # its scores are no metrics
    unused_keys: ClassVar = (
        *PPO_KEYS,
        *AGGREGATION_KEYS,
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.shuffle",
        "trainer.mismatch.*",
        "async_training.*",
        "actor_rollout_ref.rollout.temperature",
    )

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:  # noqa: ARG002
        """Return the data's solutions, truncated to `max_response_length`, as scored responses."""
        if self.solution is None:
            from rlctl.runtime.data.readers import to_scored

            return to_scored(prompts)
        texts = [read_text(row, self.solution) for row in prompts.rows]
        return self.given.to_scored(prompts, texts, torch.ones(len(prompts)))

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Update the actor once per mini-batch and return metrics."""
        order = torch.arange(len(scored)).split(self.actor.ppo_mini_batch_size)
        return merge(
            [roles.actor.update(batch, self.schedule(step - 1)) for batch in scored.chunk(order)]
        )

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return −Σ log π over the unmasked tokens of (T,), a scalar, and their number."""
        return negative_log_likelihood(outputs, batch)


def negative_log_likelihood(outputs: PolicyOutputs, batch: Rollouts) -> Loss:
    """Return −Σ log π over the unmasked tokens of a micro-batch, and their number."""
    mask = batch.response_mask.values
    total = masked_sum(-outputs.log_probs, mask)
    num_tokens = float(mask.sum())
    return Loss(total, num_tokens, {"train/loss": Mean(float(total.detach()), num_tokens)})

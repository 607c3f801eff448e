"""On-policy self-distillation: the policy learns from itself with the solution in the prompt.

OPSD (arXiv 2601.18734): the teacher is the initial policy, fixed, and sees the data's solution; the
student sees the problem only. The loss is that of `distill` on the student's responses.

With `ema_decay` the teacher follows the student, as in SDFT (arXiv 2601.19897) and SDPO (arXiv
2601.20802): its weights are an exponential moving average of the policy's,
θ̄_t = ema_decay·θ̄_{t−1} + (1 − ema_decay)·θ_t after step t, and θ̄_0 = θ_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.row_fields import RowField, read_text
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins.objectives.distill import DistillAlgorithm, DistillParams
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.batch import Ragged, Scored
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.tokenizer import encode_prompt, ends_with_assistant, tokenizer_of

_TEMPLATE = (
    "{problem}\n\nHere is a reference solution to this problem:\n{solution}\n\n"
    "After understanding it, solve the problem with your own reasoning."
)


class SelfDistillParams(DistillParams):
    """Settings of `self_distill`."""

    template: str = Field(
        default=_TEMPLATE,
        pattern=r"(?s)\{problem\}.*\{solution\}|\{solution\}.*\{problem\}",
        description="last message of the teacher's prompt, with {problem}, the student's, and "
        "{solution}, the text at data.response_key",
    )
    ema_decay: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="weight of the teacher in its moving average with the policy after each step, "
        "such as 0.95; null = the initial policy is the teacher",
    )


@dataclass(frozen=True)
class SelfDistill(DistillAlgorithm[SelfDistillParams]):
    """Distillation from the initial or the averaged policy that knows the solution; immutable."""

    Params: ClassVar[type[SelfDistillParams]] = SelfDistillParams

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: SelfDistillParams) -> Self:
        """Build as `distill`. Raises ConfigError for episodes: their openings are not in the data.

        The teacher's prompt is written from the row alone.
        """
        if config.actor_rollout_ref.rollout.multi_turn.enable:
            raise ConfigError(
                "algorithm.name=self_distill is for single responses: the prompt of an episode has "
                "tools and an opening that the teacher's prompt would lack",
                where="actor_rollout_ref.rollout.multi_turn.enable=true",
                hint="algorithm.name=distill, or multi_turn.enable=false",
            )
        return super().from_config(config, num_steps, params)

    @property
    def needs(self) -> Needs:
        """Responses, and the reference or the average as teacher."""
        if self.params.ema_decay is None:
            return super().needs
        return super().needs & ~Needs.REFERENCE | Needs.AVERAGE

    @property
    def row_fields(self) -> Sequence[RowField]:
        """The solution that the teacher sees."""
        return (self._solution,)

    @property
    def _solution(self) -> RowField:
        return RowField(self.data.response_key, "data.response_key")

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Update the actor as in `distill`, and then the teacher if it follows the policy."""
        metrics = super().learn(scored, roles, step)
        if self.params.ema_decay is not None:
            roles.actor.update_average(self.params.ema_decay)
        return metrics

    def teachers_view(self, scored: Scored) -> Scored:
        """Return the responses with prompts that contain the solution."""
        ids = [self._privileged(row) for row in scored.rows]
        return replace(scored, prompt_ids=Ragged.from_rows(ids, torch.int64), routing=None)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.model)

    def _privileged(self, row: PromptRow) -> list[int]:
        """Return the tokens of the teacher's prompt."""
        problem = len(row.prompt) - 1
        if problem and ends_with_assistant(row.prompt):
            problem -= 1
        solution = read_text(row, self._solution)
        text = self.params.template.replace("{problem}", row.prompt[problem]["content"])
        chat = [*row.prompt]
        chat[problem] = {**chat[problem], "content": text.replace("{solution}", solution)}
        return encode_prompt(self._tokenizer, chat, **self.data.apply_chat_template_kwargs)

"""On-policy self-distillation: the policy learns from itself with the solution in the prompt.

OPSD (arXiv 2601.18734): the teacher is the initial policy, fixed, and sees the data's solution; the
student sees the problem only. The loss is that of `distill` on the student's responses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.recipes import schema
from rlctl.runtime.algorithms.distill import Distill, DistillParams
from rlctl.runtime.batch import Ragged, Scored
from rlctl.runtime.data.fields import text_field
from rlctl.runtime.data.tokenizer import encode_prompt, tokenizer_of

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


@dataclass(frozen=True)
class SelfDistill(Distill):
    """Distillation from the initial policy that knows the solution; immutable."""

    Params: ClassVar[type[DistillParams]] = SelfDistillParams

    @staticmethod
    def check_teacher(config: schema.Config) -> None:
        """Accept any teacher: the actor's own model is the one of the paper."""

    def teachers_view(self, scored: Scored) -> Scored:
        """Return the responses with prompts that contain the solution."""
        ids = [self._privileged(row) for row in scored.rows]
        return replace(scored, prompt_ids=Ragged.from_rows(ids, torch.int64))

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.model)

    def _privileged(self, row: PromptRow) -> list[int]:
        """Return the tokens of the teacher's prompt."""
        assert isinstance(self.params, SelfDistillParams)
        *earlier, last = row.prompt
        solution = text_field(row, self.data.response_key, "data.response_key")
        text = self.params.template.replace("{problem}", last["content"])
        chat = [*earlier, {**last, "content": text.replace("{solution}", solution)}]
        return encode_prompt(self._tokenizer, chat, **self.data.apply_chat_template_kwargs)

"""Listener `token_values`: keeps what updates saw of the tokens of some responses of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field

from rlctl import plugins
from rlctl.plugins.console.token_values import MOST_ROWS, Recorded, RecordingActor, write_step
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.algorithms.policy_losses.base import ClipRange
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.base.stored_fields import fetched
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.training.listeners import Listener

Count = Annotated[int, Field(ge=1)]


class Params(plugins.Params):
    """Settings of `trainer.listener_params.token_values`."""

    prompts: Count = 2  # of each step, at most 16 responses to them
    steps: Count = 100  # the newest that are kept


class TokenListener(Listener):
    """Records the first update of each step, and which tokens later updates of it clip.

    It costs a pass over the recorded responses, at most 16, before each update.
    """

    Params = Params

    def __init__(self, run: RunDir, config: schema.Config, params: Params | None = None) -> None:
        super().__init__(run, config)
        self.params = params or Params()
        self.step = 1
        self.recorded: Recorded | None = None

    def wrap(self, roles: Roles) -> Roles:
        """Return the roles, with an actor whose updates are recorded."""
        if roles.actor_role is None:
            return roles
        actor: Any = RecordingActor(roles.actor_role, self._before_update)
        return replace(roles, actor_role=actor)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        self._write()
        self.step = step + 1

    def close(self) -> None:
        self._write()

    def _before_update(self, actor: Any, batch: Any) -> None:
        if self.recorded is not None:
            self._mark_clipped(actor, self.recorded)
            return
        first = batch.group.unique_consecutive()[: self.params.prompts]
        rows = torch.isin(batch.group, first).nonzero().flatten()[:MOST_ROWS]
        chosen = fetched(batch.select(rows))
        now = fetched(actor.compute_log_probs(chosen))
        log_probs = now.log_probs.values
        nothing = torch.zeros(len(now.log_probs.values))
        entropy = nothing if now.entropy is None else now.entropy.values
        diff = log_probs - chosen.rollout_log_probs.values
        self.recorded = Recorded(chosen, diff, entropy, log_probs, nothing)

    def _mark_clipped(self, actor: Any, recorded: Recorded) -> None:
        if (advantages := getattr(recorded.batch, "advantages", None)) is None:
            return
        clip = ClipRange.from_config(self.config.actor_rollout_ref.actor)
        now = fetched(actor.compute_log_probs(recorded.batch)).log_probs.values
        ratio = (now - recorded.log_probs).exp()
        sign = advantages.values
        clipped = ((sign > 0) & (ratio > 1 + clip.high)) | ((sign < 0) & (ratio < 1 - clip.low))
        recorded.clip = torch.maximum(recorded.clip, clipped.float())

    def _write(self) -> None:
        if self.recorded is None:
            return
        recorded = self.recorded
        self.recorded = None
        rows = list(recorded.rows(self._tokenizer.decode))
        write_step(self.run.path, self.step, rows, self.params.steps)

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.config.actor_rollout_ref.model)

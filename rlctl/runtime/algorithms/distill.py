"""On-policy distillation: the policy's own responses, graded token by token by a teacher.

The reference role is the teacher, with the model `actor_rollout_ref.ref.model`. It grades responses
that the policy samples: generalized knowledge distillation (arXiv 2306.13649) with only on-policy
data. The reward only serves metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rlctl.log import warn_once
from rlctl.plugins import Params as PluginParams
from rlctl.recipes import schema
from rlctl.runtime.algorithms.aggregate import aggregate, count
from rlctl.runtime.algorithms.base import (
    PPO_KEYS,
    Loss,
    Needs,
    group_batches,
    sample,
    sampling_seed,
    step_seed,
)
from rlctl.runtime.algorithms.schedule import Schedule
from rlctl.runtime.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.model.causal_lm import PolicyOutputs
from rlctl.runtime.ops import masked_sum
from rlctl.runtime.roles import Roles
from rlctl.tracking.metrics import Mean, Metrics, merge


class DistillParams(PluginParams):
    """Settings of `distill`."""

    loss_mode: Literal["reverse_kl", "forward_kl_topk"] = Field(
        default="reverse_kl",
        description="reverse_kl on the sampled tokens, or forward_kl_topk on the teacher's "
        "most probable ones",
    )
    topk: int = Field(default=32, ge=1, description="tokens of forward_kl_topk at a position")
    is_threshold: float = Field(
        default=2.0, gt=0, description="upper bound of reverse_kl's importance weights"
    )


@dataclass(frozen=True, eq=False)
class Graded(Scored):
    """Responses with the teacher's log-probs, (T,) of sampled tokens or (T, K) of candidates."""

    teacher_log_probs: Ragged


@dataclass(frozen=True)
class Distill:
    """On-policy distillation from one teacher; immutable."""

    Params: ClassVar[type[DistillParams]] = DistillParams

    actor: schema.Actor
    params: DistillParams
    data: schema.Data
    model: schema.Model
    seed: int
    schedule: Schedule

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: DistillParams) -> Self:
        """Build the algorithm; `num_steps` is the length of the learning-rate schedule."""
        actor = config.actor_rollout_ref.actor
        cls.check_teacher(config)
        return cls(
            actor=actor,
            params=params,
            seed=sampling_seed(config),
            data=config.data,
            model=config.actor_rollout_ref.model,
            schedule=Schedule.from_config(actor.optim, num_steps),
        )

    @staticmethod
    def check_teacher(config: schema.Config) -> None:
        """Warn if the teacher is the actor's initial model."""
        roles = config.actor_rollout_ref
        if roles.reference_model == roles.model:
            warn_once(
                "the teacher is the actor's own initial model, from which there is nothing to "
                "learn: set actor_rollout_ref.ref.model.path"
            )

    @property
    def needs(self) -> Needs:
        """Responses, and the reference as teacher."""
        return Needs.ENGINE | Needs.GROUPS | Needs.REFERENCE

    @staticmethod
    def unused_keys(config: schema.Config) -> Mapping[str, str]:
        """Return the keys of the PPO family."""
        reason = f"algorithm.name is {config.algorithm.name}"
        return dict.fromkeys((*PPO_KEYS, "trainer.mismatch.*"), reason)

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """Generate `rollout.n` responses to each prompt and score them, for metrics."""
        return sample(prompts, roles, step_seed(self.seed, step))

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Let the teacher grade the responses; update the actor once per mini-batch."""
        graded, actor = self.grade(scored, roles), self.actor
        seed = step_seed(actor.data_loader_seed, step) if actor.shuffle else None
        updates: list[Metrics] = []
        for groups in group_batches(
            scored.group, actor.ppo_mini_batch_size, actor.ppo_epochs, seed
        ):
            rows = torch.isin(scored.group, groups).nonzero().flatten()
            updates.append(roles.actor.update(graded.select(rows), self.schedule(step - 1)))
        return merge(updates)

    def grade(self, scored: Scored, roles: Roles) -> Graded:
        """Return the responses with the log-probs of the teacher."""
        k = 0 if self.params.loss_mode == "reverse_kl" else self.params.topk
        given = roles.reference.compute_log_probs(self.teachers_view(scored), k)
        graded = given.candidate_log_probs or given.log_probs
        scored = replace(scored, candidates=given.candidates)
        return scored.grow(Graded, teacher_log_probs=graded)

    def teachers_view(self, scored: Scored) -> Scored:
        """Return the responses with the prompts that the teacher sees."""
        return scored

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return the divergence from the teacher, aggregated over tokens; `outputs` hold (T,).

        With d_t = log π(y_t) − log π_teacher(y_t), the gradient of reverse_kl is
        Σ_t w_t·d_t·∇log π(y_t): that of KL(π ‖ teacher) at each visited context (arXiv 2306.13649,
        eq. 4), with the sampled token in place of the vocabulary. w_t = min(π/π_engine,
        is_threshold) corrects for responses of an earlier policy. forward_kl_topk is
        Σ_v π_teacher(v)·(log π_teacher(v) − log π(v)) over the teacher's K most probable tokens v.
        """
        assert isinstance(batch, Graded)
        actor, mask, row = self.actor, batch.response_mask.values, batch.response_ids.row_of_token
        width = actor.loss_scale_factor or self.data.max_response_length
        part = (mask, row, len(batch), actor.loss_agg_mode, width)
        losses, divergence = self._losses(outputs, batch)
        kl = Mean(float(masked_sum(divergence.detach(), mask)), float(mask.sum()))
        metrics: Metrics = {f"distill/{self.params.loss_mode}": kl}
        return Loss(aggregate(losses, *part), count(*part), metrics, float(mask.sum()))

    def _losses(self, outputs: PolicyOutputs, batch: Graded) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and the divergence that is reported: (T,) each."""
        now, teacher = outputs.log_probs, batch.teacher_log_probs.values
        if outputs.candidate_log_probs is not None:
            divergence = (teacher.exp() * (teacher - outputs.candidate_log_probs)).sum(-1)
            return divergence, divergence
        difference = now.detach() - teacher
        ratio = (now.detach() - batch.rollout_log_probs.values).exp()
        return ratio.clamp(max=self.params.is_threshold) * difference * now, difference

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

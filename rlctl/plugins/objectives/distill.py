"""On-policy distillation: responses of the policy, graded token by token by a teacher.

The reference role is the teacher, with the model `actor_rollout_ref.ref.model`, or one of several
for each row. It grades responses that the policy samples: generalized knowledge distillation (arXiv
2306.13649) with only on-policy data. The reward only serves metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.log import warn_once
from rlctl.plugins import Params as PluginParams
from rlctl.recipes import schema
from rlctl.runtime.algorithms.aggregate import aggregate, count
from rlctl.runtime.algorithms.base import (
    PPO_KEYS,
    Loss,
    Needs,
    PolicyAlgorithm,
    rows_of_groups,
)
from rlctl.runtime.base.batch import Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Mean, Metrics, merge
from rlctl.runtime.base.ops import PolicyOutputs, masked_sum
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.conversations import text_field

_SINGLE = ("path", "tokenizer_path", "override_config*")  # keys of a single teacher


class TeacherModel(PluginParams):
    """A teacher, and the rows that it grades."""

    key: str | None = Field(
        default=None,
        description="text of `teacher_key` in its rows; null = rows without another teacher",
    )
    model_path: str = Field(description="model: folder, address, hub name, run, or `quickstart`")


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
    loss_max_clamp: float | None = Field(
        default=None, gt=0, description="bound of a token's divergence on both sides; null = none"
    )
    log_prob_min_clamp: float | None = Field(
        default=None, lt=0, description="lower bound of forward_kl_topk's log-probs; null = none"
    )
    teacher_key: str = Field(
        default="data_source",
        description="text of a row that selects its teacher: data_source or extra_info.NAME",
    )
    teacher_models: dict[str, TeacherModel] = Field(
        default_factory=dict,
        description="teachers by a name of your choice, each with `model_path` and the `key` of "
        "its rows; empty = actor_rollout_ref.ref.model grades all rows",
    )


@dataclass(frozen=True, eq=False)
class Graded(Scored):
    """Responses with the teacher's log-probs, (T,) of sampled tokens or (T, K) of candidates."""

    teacher_log_probs: Ragged


D = TypeVar("D", bound=DistillParams)


@dataclass(frozen=True)
class DistillAlgorithm(PolicyAlgorithm[D]):
    """Base of on-policy distillation from one teacher, or from one for each kind of row."""

    references: Mapping[str, schema.Model] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: D) -> Self:
        """Build the algorithm. Raises ConfigError if two teachers grade the same rows."""
        teachers = _teachers(config.actor_rollout_ref.reference_model, params)
        return replace(super().from_config(config, num_steps, params), references=teachers)

    @property
    def needs(self) -> Needs:
        """Responses, and the reference as teacher."""
        return Needs.ENGINE | Needs.GROUPS | Needs.REFERENCE

    @staticmethod
    def unused_keys(config: schema.Config) -> Mapping[str, str]:
        """Return the keys of the PPO family."""
        unused: dict[str, str] = dict.fromkeys((*PPO_KEYS, "trainer.mismatch.*"), "")
        if config.algorithm.params.get("teacher_models"):
            reason = "algorithm.params.teacher_models names the teachers"
            unused |= dict.fromkeys(
                (f"actor_rollout_ref.ref.model.{key}" for key in _SINGLE), reason
            )
        return unused

    def reference_of(self, row: PromptRow) -> str:
        """Return the name of the row's teacher. Raises ConfigError if it has none."""
        params = self.params
        names = {teacher.key: name for name, teacher in params.teacher_models.items()}
        key = text_field(row, params.teacher_key, "algorithm.params.teacher_key")
        name = names.get(key, names.get(None))
        if name is None:
            raise ConfigError(
                f"no teacher for rows whose {params.teacher_key} is {key!r}; there are those of "
                f"{', '.join(map(repr, names))}",
                where="algorithm.params.teacher_models",
                hint="a teacher without `key` grades all other rows",
            )
        return name

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Let the teacher grade the responses; update the actor once per mini-batch."""
        graded = self.grade(scored, roles)
        return merge(
            [
                roles.actor.update(graded.select(rows), self.schedule(step - 1))
                for rows in rows_of_groups(scored.group, scored.group, self.actor, step)
            ]
        )

    def grade(self, scored: Scored, roles: Roles) -> Graded:
        """Return the responses with the log-probs of the teacher."""
        k = 0 if self.params.loss_mode == "reverse_kl" else self.params.topk
        grades = roles.reference.compute_log_probs(self.teachers_view(scored), k)
        graded = grades.candidate_log_probs or grades.log_probs
        scored = replace(scored, candidates=grades.candidates)
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
        actor = self.actor
        mask = batch.response_mask.values
        row = batch.response_ids.row_of_token
        width = actor.loss_scale_factor or self.data.max_response_length
        part = (mask, row, len(batch), actor.loss_agg_mode, width)
        losses, divergence = self._losses(outputs, batch)
        kl = Mean(float(masked_sum(divergence.detach(), mask)), float(mask.sum()))
        metrics: Metrics = {f"distill/{self.params.loss_mode}": kl}
        return Loss(aggregate(losses, *part), count(*part), metrics, float(mask.sum()))

    def _losses(self, outputs: PolicyOutputs, batch: Graded) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and the divergence that is reported: (T,) each."""
        now = outputs.log_probs
        teacher = batch.teacher_log_probs.values
        if outputs.candidate_log_probs is not None:
            student = outputs.candidate_log_probs
            least = self.params.log_prob_min_clamp
            if least is not None:
                student = student.clamp(min=least)
                teacher = teacher.clamp(min=least)
            divergence = self._bounded((teacher.exp() * (teacher - student)).sum(-1))
            return divergence, divergence
        difference = self._bounded(now.detach() - teacher)
        ratio = (now.detach() - batch.rollout_log_probs.values).exp()
        return ratio.clamp(max=self.params.is_threshold) * difference * now, difference

    def _bounded(self, divergence: Tensor) -> Tensor:
        most = self.params.loss_max_clamp
        return divergence if most is None else divergence.clamp(-most, most)


@dataclass(frozen=True)
class Distill(DistillAlgorithm[DistillParams]):
    """On-policy distillation from other models; immutable."""

    Params: ClassVar[type[DistillParams]] = DistillParams

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: DistillParams) -> Self:
        """Build the algorithm; warn if the teacher is the actor's initial model."""
        roles = config.actor_rollout_ref
        if not params.teacher_models and roles.reference_model == roles.model:
            warn_once(
                "the teacher is the actor's initial model, from which there is nothing to learn: "
                "set actor_rollout_ref.ref.model.path"
            )
        return super().from_config(config, num_steps, params)


def _teachers(reference: schema.Model, params: DistillParams) -> dict[str, schema.Model]:
    """Return the models of several teachers; raise ConfigError if two have the same rows."""
    teachers = params.teacher_models
    keys = [teacher.key for teacher in teachers.values()]
    for name, teacher in teachers.items():
        if keys.count(teacher.key) > 1:
            raise ConfigError(
                f"two teachers have the key {teacher.key!r}, one of them {name!r}",
                where="algorithm.params.teacher_models",
                hint="a separate key for each; null = all other rows",
            )
    defaults = {"tokenizer_path": None, "override_config": {}, "init": "auto", "lora_rank": 0}
    return {
        name: reference.model_copy(update={**defaults, "path": teacher.model_path})
        for name, teacher in teachers.items()
    }

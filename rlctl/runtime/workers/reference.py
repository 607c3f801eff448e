"""Worker of the frozen reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlctl.recipes import schema
from rlctl.recipes.role_table import REFERENCE
from rlctl.runtime.algorithms.base import Needs, training_temperature
from rlctl.runtime.base.batch import LogProbs, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Reference
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import load_model, master_dtype
from rlctl.runtime.workers.base import ModelWorker, prepare
from rlctl.runtime.workers.dispatch import Dispatch, dispatch
from rlctl.runtime.workers.learner import Learner


@dataclass(frozen=True)
class ReferenceSpec:
    """Settings of a reference."""

    model: schema.Model
    ref: schema.Ref
    temperature: float
    seed: int
    compiled: bool | None = False  # its layers: see `use_torch_compile`

    @property
    def fsdp(self) -> schema.FSDP:
        """See `ShardedSpec`."""
        return self.ref.fsdp_config

    @classmethod
    def from_config(cls, config: schema.Config, needs: Needs, model: schema.Model) -> Self:
        """Return the settings of a reference with `model` for an algorithm with these needs."""
        roles = config.actor_rollout_ref
        temperature = training_temperature(needs, roles.rollout)
        seed = config.trainer.seed
        compiled = roles.actor.use_torch_compile
        return cls(model, roles.ref, temperature, seed, compiled)


class ReferenceWorker(ModelWorker, Reference):
    """Implements `Reference` on one rank."""

    def __init__(self, rank_info: RankInfo, spec: ReferenceSpec) -> None:
        hf = load_model(
            spec.model, "policy", master_dtype(spec.ref.fsdp_config), spec.seed, mapped=True
        )
        hf.requires_grad_(False)
        policy = PolicyModel(hf, spec.temperature)
        fsdp = spec.ref.fsdp_config
        self.policy = prepare(policy, spec.model, fsdp, rank_info, spec.compiled)
        self.learner = Learner(self.policy, rank_info, None, fsdp)
        ranks = fsdp.ulysses_sequence_parallel_size
        self.budget = Budget.of_log_probs(REFERENCE.section, spec.ref, ranks)

    @dispatch(Dispatch.SPLIT, phase="ref", reads=True)
    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        return self.learner.infer_policy(self.policy, batch, self.budget, top_k)

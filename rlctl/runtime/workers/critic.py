"""Worker of the value function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlctl.recipes import schema
from rlctl.recipes.role_table import CRITIC
from rlctl.runtime.algorithms.base import Loss, ValueLoss
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Critic
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.adapter_names import adapt
from rlctl.runtime.model.causal_lm import ValueModel
from rlctl.runtime.model.load import load_model, master_dtype
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.tower import freeze_tower
from rlctl.runtime.workers.base import LearningWorker, prepare
from rlctl.runtime.workers.dispatch import Dispatch, dispatch
from rlctl.runtime.workers.learner import Learner


@dataclass(frozen=True)
class CriticSpec:
    """Settings of a critic."""

    critic: schema.Critic
    algorithm: ValueLoss
    seed: int
    compiled: bool | None = False  # its layers: see `use_torch_compile`

    @property
    def fsdp(self) -> schema.FSDP:
        """See `ShardedSpec`."""
        return self.critic.fsdp_config


class CriticWorker(LearningWorker, Critic):
    """Implements `Critic` on one rank."""

    def __init__(self, rank_info: RankInfo, spec: CriticSpec) -> None:
        critic = spec.critic
        hf = load_model(
            critic.model, "backbone", master_dtype(critic.fsdp_config), spec.seed, mapped=True
        )
        freeze_tower(hf)
        adapt(hf, critic.model, spec.seed)
        save_activation_memory(hf, critic.model)
        self.spec = spec
        model = ValueModel(hf)
        compiled = spec.compiled
        self.model = prepare(model, critic.model, critic.fsdp_config, rank_info, compiled)
        self.learner = Learner(self.model, rank_info, critic.optim, critic.fsdp_config, CRITIC.name)
        ranks = critic.fsdp_config.ulysses_sequence_parallel_size
        self.budget = Budget.of_updates(CRITIC.section, critic, ranks)

    @dispatch(Dispatch.SPLIT, phase="values", reads=True)
    def compute_values(self, batch: Rollouts) -> Ragged:
        def forward(sequences: Sequences) -> tuple[Tensor]:
            return (self.model(sequences),)

        (values,) = self.learner.infer(batch, self.budget, forward)
        return values

    @dispatch(Dispatch.SPLIT, phase="update_critic")
    def update(self, batch: Rollouts, lr: float) -> Metrics:
        def loss(sequences: Sequences, part: Rollouts) -> Loss:
            return self.spec.algorithm.value_loss(self.model(sequences), part)

        return self.learner.learn(batch, self.budget, loss, lr, self.spec.critic.grad_clip)[0]

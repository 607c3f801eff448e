"""Workers of the reward model: frozen in a run of a policy, or trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlctl.recipes import schema
from rlctl.recipes.role_table import REWARD_LEARNER, REWARD_MODEL
from rlctl.runtime.algorithms.base import Loss, ScoreLoss
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import RewardLearner, RewardModel
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.adapter_names import adapt
from rlctl.runtime.model.load import Kind, load_model, master_dtype
from rlctl.runtime.model.reward_model import RewardModel as Model
from rlctl.runtime.model.reward_model import write_scale
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.tower import freeze_tower
from rlctl.runtime.workers.base import LearningWorker, ModelWorker, prepare
from rlctl.runtime.workers.dispatch import Dispatch, dispatch
from rlctl.runtime.workers.learner import Learner


@dataclass(frozen=True)
class RewardModelSpec:
    """Settings of a reward model."""

    reward_model: schema.RewardModel
    seed: int
    algorithm: ScoreLoss | None = None  # of a model that is trained

    @property
    def fsdp(self) -> schema.FSDP:
        """See `ShardedSpec`."""
        return self.reward_model.fsdp_config


class RewardModelWorker(ModelWorker, RewardModel):
    """Implements `RewardModel` on one rank."""

    def __init__(self, rank_info: RankInfo, spec: RewardModelSpec) -> None:
        self.spec = spec
        settings = spec.reward_model
        learns = spec.algorithm is not None
        fsdp = settings.fsdp_config
        kind = REWARD_LEARNER.kind if learns else REWARD_MODEL.kind
        self.model = _build(settings, kind, rank_info, spec.seed, learns)
        optim = settings.optim if learns else None
        self.learner = Learner(self.model, rank_info, optim, fsdp, REWARD_MODEL.name)
        self.budget = _budget(settings)

    @dispatch(Dispatch.SPLIT, phase="rm_scores", reads=True)
    def compute_rewards(self, batch: Rollouts) -> Ragged:
        def forward(sequences: Sequences) -> tuple[Tensor]:
            return (self.model(sequences),)

        (scores,) = self.learner.infer(batch, self.budget, forward, per_row=True)
        return scores


class RewardLearnerWorker(RewardModelWorker, LearningWorker, RewardLearner):
    """Implements `RewardLearner` on one rank."""

    @dispatch(Dispatch.SPLIT, phase="update_rm")
    def update(self, batch: Rollouts, lr: float) -> Metrics:
        algorithm = self.spec.algorithm
        assert algorithm is not None, "this model is not trained"

        def loss(sequences: Sequences, part: Rollouts) -> Loss:
            return algorithm.score_loss(self.model(sequences), part)

        grad_clip = self.spec.reward_model.grad_clip
        return self.learner.learn(batch, self.budget, loss, lr, grad_clip)[0]

    @dispatch(Dispatch.BROADCAST)
    def set_scale(self, mean: float, std: float) -> None:
        write_scale(self.model.hf.config, mean, std)


def _build(
    settings: schema.RewardModel, kind: Kind, rank_info: RankInfo, seed: int, learns: bool
) -> Model:
    """Load, check and shard the model."""
    model = settings.model
    hf = load_model(model, kind, master_dtype(settings.fsdp_config), seed, mapped=True)
    if learns:
        freeze_tower(hf)
        adapt(hf.base_model, model, seed)  # the head is trained as it is
        save_activation_memory(hf, model)
    else:
        hf.requires_grad_(False)
    return prepare(Model(hf), model, settings.fsdp_config, rank_info)


def _budget(settings: schema.RewardModel) -> Budget:
    if settings.use_dynamic_bsz or settings.micro_batch_size_per_gpu is None:
        key = f"{REWARD_MODEL.section}.forward_max_token_len_per_gpu"
        ranks = settings.fsdp_config.ulysses_sequence_parallel_size
        return Budget(key, settings.forward_max_token_len_per_gpu, "tokens", ranks)
    assert REWARD_MODEL.max_rows_key is not None, "the table names the key"
    return Budget(REWARD_MODEL.max_rows_key, settings.micro_batch_size_per_gpu, "rows")

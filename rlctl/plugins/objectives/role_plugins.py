"""Roles of the kind `roles`: reward models, frozen or trained, and a judge that the run serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlctl.recipes.role_table import REWARD_LEARNER, REWARD_MODEL
from rlctl.runtime.algorithms.base import ScoreLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.plugins.objectives.pair_validation import PairValidator
    from rlctl.recipes import schema
    from rlctl.runtime.algorithms.base import Algorithm
    from rlctl.runtime.base.roles import Reward, RewardLearner, RewardModel
    from rlctl.runtime.cluster.pools import Pool
    from rlctl.runtime.data.loader import PromptSet


class RewardModelRole:
    """A frozen model that scores responses."""

    def check(self, config: schema.Config) -> None:
        """Raise ConfigError if config.json has no scale that is asked for."""
        settings = config.reward.reward_model
        if settings.normalize == "model":
            from rlctl.plugins.objectives.model_reward import scale_of_model

            scale_of_model(settings.model)

    def build(
        self, config: schema.Config, pool: Pool, algorithm: Algorithm | None = None
    ) -> RewardModel:
        """Build the model in the processes of `pool`."""
        from rlctl.plugins.objectives.reward_worker import RewardModelSpec, RewardModelWorker

        del algorithm  # it does not learn
        spec = RewardModelSpec(config.reward.reward_model, config.trainer.seed)
        return pool.spawn(REWARD_MODEL.name, RewardModelWorker, spec)

    def score(
        self,
        config: schema.Config,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward,
        built: RewardModel,
    ) -> Reward:
        """Return the weighted sum of the model's score and that of the functions."""
        from rlctl.plugins.objectives.model_reward import ModelReward

        return ModelReward.from_config(config.reward, tokenizer, reward, built)

    def validator(self, config: schema.Config, prompts: PromptSet) -> PairValidator:
        """Return the validation on preference pairs."""
        from rlctl.plugins.objectives.pair_validation import PairValidator
        from rlctl.runtime.data.conversations import Pairs

        pairs = Pairs.from_config(config.reward.reward_model, config.data)
        return PairValidator(prompts, config.data.val_batch_size, pairs)


class RewardLearnerRole(RewardModelRole):
    """A reward model that is trained, in place of a policy."""

    def build(
        self, config: schema.Config, pool: Pool, algorithm: Algorithm | None = None
    ) -> RewardLearner:
        """Build the model in the processes of `pool`; `algorithm` has its loss."""
        from rlctl.plugins.objectives.reward_worker import RewardLearnerWorker, RewardModelSpec

        settings = config.reward.reward_model
        spec = RewardModelSpec(settings, config.trainer.seed, cast(ScoreLoss, algorithm))
        return pool.spawn(REWARD_LEARNER.name, RewardLearnerWorker, spec)


class JudgeRole:
    """Engines that serve the run's judge to its reward functions."""

    def check(self, config: schema.Config) -> None:
        """Do nothing: the check of the reward functions asks the judge."""

    def build(
        self, config: schema.Config, pool: Pool, algorithm: Algorithm | None = None
    ) -> tuple[list[str], str]:
        """Start an engine in each process of `pool`; return the addresses, and their key."""
        from rlctl.plugins.objectives.judge_worker import JudgeSpec, JudgeWorker
        from rlctl.runtime.serving.chat_request import new_key
        from rlctl.runtime.serving.endpoint import LOOPBACK

        del algorithm  # it does not learn
        spec = JudgeSpec.from_config(config)
        worker = pool.spawn(JudgeWorker.__name__, JudgeWorker, spec)
        key = new_key()
        one_node = config.trainer.nnodes == 1
        hosts = [LOOPBACK if one_node else node.split()[0] for node in pool.nodes]
        return worker.serve([(key, host) for host in hosts]), key

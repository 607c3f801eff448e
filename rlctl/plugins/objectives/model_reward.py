"""The role `Reward` with a reward model: its scores, together with functions or alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlctl.data_prep.message_parts import ASSISTANT
from rlctl.episodes import Message
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.recipes.role_table import REWARD_MODEL
from rlctl.runtime.base.batch import Rollouts, Scores
from rlctl.runtime.base.clock import timed
from rlctl.runtime.base.image_processor import Images
from rlctl.runtime.base.roles import Reward, RewardModel
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.data.tokenizer import Chat, with_response
from rlctl.runtime.model.reward_model import MEAN, STD
from rlctl.runtime.rewards.role import RULE, RuleReward, check_failed_share
from rlctl.storage import local

LOG = logging.getLogger(__name__)


@dataclass
class ModelReward(Reward):
    """Weighted sum of a model's score and the score of reward functions or environments.

    The model reads the messages of the prompt and the text of the response, or the messages of the
    episode, in its chat template. The component `rule` is the functions' score, of the rows
    that have one; `reward_model` is the model's, before normalization. A score that is no finite
    number counts as a failed call: the row scores 0, and no moment includes it.
    """

    rules: Reward
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase  # of the policy
    conversations: Conversations  # in the words of the reward model
    weight: float
    rule_weight: float
    scale: Scale | None  # None: no normalization
    max_failed_share: float = 1.0  # of a batch's responses without a score of the model

    @classmethod
    def from_config(
        cls,
        config: schema.Reward,
        tokenizer: PreTrainedTokenizerBase,
        rules: Reward,
        model: RewardModel,
    ) -> ModelReward:
        """Combine `model` with reward functions; `tokenizer` is that of the policy.

        Raises ConfigError if the model's mean and deviation are wanted and its config has none.
        """
        settings = config.reward_model
        scale = None if settings.normalize is None else Scale()
        if settings.normalize == "model":
            scale = scale_of_model(settings.model)
        conversations = Conversations.from_config(settings)
        weights = settings.weight, settings.rule_weight
        share = config.max_failed_share
        return cls(rules, model, tokenizer, conversations, *weights, scale, share)

    @timed("reward")
    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        """See `Reward`. A conversation that the chat template rejects scores 0 and has failed.

        Raises RlctlError if the model has no score for too many responses.
        """
        rules = self.rules.compute_scores(rollouts, validate)
        raw, cut = self._raw_scores(rollouts)
        components = {**rules.components, REWARD_MODEL.name: raw}
        has_rule = torch.ones(len(rollouts), dtype=torch.bool)
        if isinstance(self.rules, RuleReward):
            has_rule = self.rules.scored_rows(rollouts)
        if has_rule.any():
            components[RULE] = torch.where(has_rule, rules.scores, torch.nan)
        if cut.any():
            components[f"{REWARD_MODEL.name}/truncated"] = cut.float()
        turns = rollouts.step_rewards
        return replace(
            rules,
            scores=self.rule_weight * rules.scores + self.weight * self._scaled(raw, validate),
            components=components,
            failed=rules.failed | raw.isnan(),
            step_rewards=None if turns is None else turns.like(self.rule_weight * turns.values),
        )

    def _raw_scores(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the model's scores (B,), NaN if there is none, and which conversations are cut."""
        images = rollouts.images or [()] * len(rollouts)
        encoded = list(map(self._encode, self._chats(rollouts), images))
        usable = torch.tensor([ids is not None for ids in encoded])
        played = torch.tensor([not episode.failed for episode in rollouts.episodes] or [True])
        index = (usable & played).nonzero().flatten()
        raw = torch.full((len(rollouts),), torch.nan)
        if len(index):
            ids = [encoded[i] or [] for i in index.tolist()]
            rows = self.conversations.to_rollouts(rollouts.select(index), ids)
            values = self.model.compute_rewards(rows).values.float().cpu()
            raw[index] = torch.where(values.isfinite(), values, torch.nan)
        num_failed = int((raw.isnan() & played).sum())
        if num_failed:
            LOG.warning(
                "the reward model has no score for %d of %d responses", num_failed, len(raw)
            )
        check_failed_share(
            num_failed, len(raw), self.max_failed_share, "no finite score of the reward model"
        )
        return raw, torch.tensor([self.conversations.is_too_long(ids or []) for ids in encoded])

    def _scaled(self, raw: Tensor, validate: bool) -> Tensor:
        """Return the normalized scores (B,); rows without one (NaN) score 0."""
        if self.scale is None:
            return raw.nan_to_num()
        if not validate:
            self.scale.update(raw[~raw.isnan()])
        return self.scale.normalize(raw).nan_to_num()

    def _chats(self, rollouts: Rollouts) -> list[Chat]:
        """Return the messages of each row, up to the policy's last."""
        if rollouts.episodes:
            return [
                _joined(
                    _chat(episode.opening) or row.prompt,
                    _chat(_up_to_last_turn(episode.messages)),
                )
                for row, episode in zip(rollouts.rows, rollouts.episodes, strict=True)
            ]
        texts = self.tokenizer.batch_decode(
            [ids.tolist() for ids in rollouts.response_ids.rows()], skip_special_tokens=True
        )
        return [
            with_response(row.prompt, text) for row, text in zip(rollouts.rows, texts, strict=True)
        ]

    def _encode(self, chat: Chat, images: Images) -> list[int] | None:
        """Return the tokens of a conversation, or None if the chat template rejects it."""
        try:
            return self.conversations.encode(chat, images)
        except ConfigError as error:
            message = error.problems[0].message
            LOG.warning("the reward model cannot read a response, which scores 0: %s", message)
            return None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scale is None else self.scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scale is not None:
            self.scale.load_state_dict(state)


def _chat(messages: Sequence[Message]) -> Chat:
    return [{"role": message.role, "content": message.text} for message in messages]


def _joined(prompt: Chat, turns: Chat) -> Chat:
    """Return the messages of an episode; its first turn continues an assistant's last message."""
    if not turns or turns[0]["role"] != ASSISTANT:
        return [*prompt, *turns]
    return [*with_response(prompt, turns[0]["content"]), *turns[1:]]


def _up_to_last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Leave out the replies after the policy's last turn, which it has not seen."""
    num_turns = [number for number, message in enumerate(messages, 1) if message.trained]
    return messages[: num_turns[-1]] if num_turns else ()


def scale_of_model(model: schema.Model) -> Scale:
    """Return mean and deviation that config.json has; raise ConfigError if it has none."""
    config = AutoConfig.from_pretrained(
        local(model.path), trust_remote_code=model.trust_remote_code
    )
    mean, std = (getattr(config, name, None) for name in (MEAN, STD))
    if mean is None or std is None:
        raise ConfigError(
            f"the config.json of {model.path!r} has no {MEAN} and {STD}",
            where=f"{REWARD_MODEL.section}.normalize",
            hint="running, or a model that `rlctl train rm` has trained",
        )
    return Scale(1.0, mean, std**2, running=False)


_EPSILON = 1e-6


@dataclass
class Scale:
    """Mean and sum of squared deviations of `count` scores.

    With `running`, the scores of each batch are included before it is normalized (Chan, Golub and
    LeVeque 1979, equations 2.1).
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    running: bool = True

    @property
    def std(self) -> float:
        """Standard deviation; 1 until scores differ."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0

    def update(self, scores: Tensor) -> None:
        """Include `scores` (N,)."""
        if not self.running or not len(scores):
            return
        values = scores.double()
        number = len(scores)
        mean = float(values.mean())
        total = self.count + number
        difference = mean - self.mean
        self.squares += float((values - mean).square().sum())
        self.squares += difference**2 * self.count * number / total
        self.mean += difference * number / total
        self.count = total

    def normalize(self, scores: Tensor) -> Tensor:
        """Return (scores - mean) / std, (N,) float32."""
        return ((scores.double() - self.mean) / (self.std + _EPSILON)).float()

    def state_dict(self) -> dict[str, Any]:
        """Return what changes between steps."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state and self.running:
            self.count, self.mean, self.squares = (
                state[name] for name in ("count", "mean", "squares")
            )

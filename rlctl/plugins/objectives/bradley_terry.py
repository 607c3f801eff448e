"""Training of a reward model on preference pairs (Bradley and Terry 1952; arXiv 2203.02155, eq. 1).

The loss of a pair needs the scores of both of its conversations, which ranks and micro-batches may
separate: its derivatives by the scores are computed on the controller, as in `pair_losses`. Both
passes must agree, so dropout is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlctl.data_prep.row_fields import RowField
from rlctl.plugins import Params
from rlctl.plugins.objectives.pair_losses import PairRows
from rlctl.recipes import schema
from rlctl.recipes.role_table import REWARD_LEARNER, REWARD_MODEL
from rlctl.runtime.algorithms.base import Loss, Needs
from rlctl.runtime.algorithms.lr_schedule import Schedule
from rlctl.runtime.algorithms.pair_metrics import moments, pair_metrics
from rlctl.runtime.base.batch import Prompts, Rollouts, Scored
from rlctl.runtime.base.metrics import Metrics, merge
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.conversations import MARGIN, Pairs, pair_fields

_SCALE_DECAY = 0.9  # of the mean and deviation of the scores, per update


class BradleyTerryParams(Params):
    """Settings of the loss."""

    margin: bool = Field(
        default=False,
        description="subtract the pair's `extra_info.margin` from the difference of scores",
    )
    center_rewards_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="coefficient of (r_w + r_l)², which centers the scores around 0",
    )

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        """Return the loss of P pairs from the scores of both conversations, (P,) each.

        −log σ(r_w − r_l − m) (margin m: arXiv 2307.09288, eq. 2), plus c·(r_w + r_l)²
        (arXiv 2312.09244).
        """
        centering = self.center_rewards_coefficient * (chosen + rejected).square()
        return -logsigmoid(chosen - rejected - margins) + centering


@dataclass
class BradleyTerry:
    """Training of a reward model; one update per mini-batch of pairs."""

    reward_model: schema.RewardModel
    data: schema.Data
    schedule: Schedule
    params: BradleyTerryParams
    scale: dict[str, float] = field(default_factory=dict)  # decayed means of scores and squares

    Params: ClassVar[type[BradleyTerryParams]] = BradleyTerryParams

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: BradleyTerryParams) -> Self:
        """Build the algorithm; `num_steps` is the length of the learning-rate schedule."""
        settings = config.reward.reward_model
        return cls(settings, config.data, Schedule.from_config(settings.optim, num_steps), params)

    @property
    def needs(self) -> Needs:
        """The reward model, and no policy."""
        return Needs.REWARD_LEARNER

    @property
    def row_fields(self) -> Sequence[RowField]:
        """Both responses, and the margin if it is used."""
        if not self.params.margin:
            return pair_fields(self.data)
        return (*pair_fields(self.data), MARGIN)

    has_rewards: ClassVar = False  # the mean of its scores is arbitrary
    unused_keys: ClassVar = (
        "actor_rollout_ref.actor.*",
        "actor_rollout_ref.rollout.*",
        "actor_rollout_ref.ref.*",
        "algorithm.[!np]*",
        "reward.[!r]*",
        *(
            f"{REWARD_LEARNER.section}.{key}"
            for key in ("enable", "weight", "rule_weight", "normalize")
        ),
        "trainer.mismatch.*",
        "data.max_response_length",
    )

    @cached_property
    def pairs(self) -> Pairs:
        """The conversations of the rows."""
        return Pairs.from_config(self.reward_model, self.data)

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:  # noqa: ARG002
        """Return both conversations of each pair, adjacent, with the model's scores: 2·B rows."""
        rows = self.pairs.rollouts(prompts)
        return rows.grow(
            Scored,
            scores=roles.reward_learner.compute_rewards(rows).values,
            components={},
            failed=torch.zeros(len(rows), dtype=torch.bool),
        )

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Update the reward model once per mini-batch and return metrics."""
        learner = roles.reward_learner
        lr = self.schedule(step - 1)
        metrics: list[Metrics] = []
        for rows in torch.arange(len(scored)).split(2 * self.reward_model.ppo_mini_batch_size):
            batch = scored.select(rows)
            # The first update starts from the weights that `collect` scored with.
            scores = learner.compute_rewards(batch).values if metrics else batch.scores
            margins = self.pairs.margins(batch.rows[::2]) if self.params.margin else None
            pair_rows, losses = with_coefficients(batch, scores, margins, self.params)
            metrics.append(pair_metrics(scores, losses, REWARD_MODEL.name))
            metrics.append(learner.update(pair_rows, lr))
            learner.set_scale(*self._update_scale(scores))
        return merge(metrics)

    def _update_scale(self, scores: Tensor) -> tuple[float, float]:
        """Return the decayed mean and standard deviation of the latest scores."""
        mean = float(scores.double().mean())
        second = float(scores.double().square().mean())
        keep = _SCALE_DECAY if self.scale else 0.0
        self.scale = {
            "mean": keep * self.scale.get("mean", 0.0) + (1 - keep) * mean,
            "second": keep * self.scale.get("second", 0.0) + (1 - keep) * second,
        }
        return moments(self.scale)

    def score_loss(self, scores: Tensor, batch: Rollouts) -> Loss:
        """Return the loss of a micro-batch from its scores (B,)."""
        assert isinstance(batch, PairRows), "the batches of `learn`"
        return batch.loss((batch.coefficients * scores).sum())

    def state_dict(self) -> dict[str, Any]:
        """Return the decayed means of the scores and of their squares."""
        return dict(self.scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = dict(state)


def with_coefficients(
    batch: Scored, scores: Tensor, margins: Tensor | None, params: BradleyTerryParams
) -> tuple[PairRows, Tensor]:
    """Return the rows with the derivatives of the sum of the pairs' losses, and the losses (P,).

    `scores` (2·P,) are those of the weights that the update starts from.
    """
    r = scores.double().requires_grad_()
    losses = params.losses(r[0::2], r[1::2], torch.zeros(()) if margins is None else margins)
    pairs = torch.arange(len(batch)).view(-1, 2)
    return PairRows.derive(batch, r, losses, pairs), losses.detach()

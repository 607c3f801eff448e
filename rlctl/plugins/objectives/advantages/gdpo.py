"""GDPO: GRPO for each component of the reward."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import Params
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
)
from rlctl.runtime.algorithms.base import Needs


class GdpoParams(Params):
    """Components of the reward and their weights."""

    reward_keys: tuple[str, ...] | None = Field(
        default=None, description="components of the reward that count; null = all"
    )
    reward_weights: tuple[float, ...] | None = Field(
        default=None, description="one weight for each of reward_keys; null = 1 each"
    )

    @model_validator(mode="after")
    def _one_weight_per_key(self) -> Self:
        weights = self.reward_weights
        keys = self.reward_keys or ()
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"reward_weights has {len(weights)} weights for {len(keys)} reward_keys"
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each selected component; empty = all components, 1 each."""
        keys = self.reward_keys or ()
        return dict(zip(keys, self.reward_weights or (1.0,) * len(keys), strict=True))


@estimator(
    needs=Needs.COMPARISON | Needs.COMPONENTS,
    params=GdpoParams,
    by_group=True,
    uses=("norm_by_std",),
)
def gdpo(
    inputs: AdvantageInputs, config: AdvantageConfig, params: GdpoParams
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each component's GRPO advantages, whitened: (B, R), twice.

    GDPO, arXiv 2601.05242. A component with small numbers counts as much as one with large
    numbers. Raises ConfigError for a key that is no component of the reward.
    """
    if missing := sorted(set(params.weights) - set(inputs.components)):
        known = ", ".join(sorted(inputs.components)) or "none"
        raise ConfigError(
            f"the reward has no component {', '.join(missing)}; its components: {known}",
            where="algorithm.adv_estimator_params.reward_keys",
        )
    weights = params.weights or dict.fromkeys(inputs.components, 1.0)
    total = torch.zeros_like(inputs.scores)
    for name, weight in weights.items():
        component = inputs.components[name].to(total)
        total = total + weight * normalised(
            component, inputs.group, config.norm_by_std, inputs.counted
        )
    advantages = inputs.whitened(total[:, None] * inputs.mask) * inputs.mask
    return advantages, advantages

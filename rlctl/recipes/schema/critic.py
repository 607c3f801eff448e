"""Section `critic`: the value model and its training."""

from __future__ import annotations

from pydantic import Field

from rlctl.recipes.schema.fields import (
    LossAggregation,
    PositiveFloat,
)
from rlctl.recipes.schema.model import FSDP, Model
from rlctl.recipes.schema.optim import Optim
from rlctl.recipes.schema.policy import Updates


class Critic(Updates):
    """Settings of `critic`."""

    model: Model
    optim: Optim
    cliprange_value: PositiveFloat = Field(
        description="value change above which the value loss is clipped"
    )
    loss_agg_mode: LossAggregation = Field(description="aggregation of token losses")
    grad_clip: PositiveFloat = Field(description="maximum gradient norm")
    fsdp_config: FSDP

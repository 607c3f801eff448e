"""Section `critic`: the value model and its training."""

from __future__ import annotations

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    LossAggregation,
    PositiveFloat,
    Section,
    Seed,
)
from rlctl.recipes.schema.policy import FSDP, Model, Optim


class Critic(Section):
    """Settings of `critic`."""

    model: Model
    optim: Optim
    ppo_mini_batch_size: Count = Field(
        description="prompts per update; divides data.train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Count | None = Field(
        description="rows per forward pass and rank if use_dynamic_bsz is false; "
        "null = by token budget"
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches up to the token budget, sorted by length"
    )
    ppo_max_token_len_per_gpu: Count = Field(
        description="token budget of a micro-batch, prompts and responses"
    )
    ppo_epochs: Count = Field(description="passes over the rollout batch per step")
    shuffle: bool = Field(description="shuffle rows into new mini-batches in each pass")
    data_loader_seed: Seed = Field(description="seed of the mini-batch shuffle")
    cliprange_value: PositiveFloat = Field(
        description="value change above which the value loss is clipped"
    )
    loss_agg_mode: LossAggregation = Field(description="aggregation of token losses")
    grad_clip: PositiveFloat = Field(description="maximum gradient norm")
    fsdp_config: FSDP

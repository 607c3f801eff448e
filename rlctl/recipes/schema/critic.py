"""`critic`: the value model and its training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    LossAggregation,
    NonNegativeInt,
    PositiveFloat,
    Section,
)
from rlctl.recipes.schema.policy import FSDP, Model, Optim


class Critic(Section):
    strategy: Literal["fsdp2"] = Field(description="how the value model is spread over ranks")
    model: Model
    optim: Optim
    ppo_mini_batch_size: Count = Field(
        description="prompts an update; divides data.train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Count | None = Field(
        description="rows in one pass of a rank, where use_dynamic_bsz is false; null = by token budget"
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches by the token budget, sorted by length"
    )
    ppo_max_token_len_per_gpu: Count = Field(
        description="token budget of a micro-batch, prompt and answer"
    )
    ppo_epochs: Count = Field(description="passes over the rollouts of a step")
    shuffle: bool = Field(description="shuffle rows into mini-batches anew in each pass")
    data_loader_seed: NonNegativeInt = Field(description="seed of that shuffle")
    cliprange_value: PositiveFloat = Field(
        description="a new value may differ this much from the old one before the loss is clipped"
    )
    loss_agg_mode: LossAggregation = Field(description="how token losses become one number")
    grad_clip: PositiveFloat = Field(description="largest norm of the gradient")
    fsdp_config: FSDP
    tensor_parallel_size: Count = Field(description="ranks that share each layer's matrices")
    context_parallel_size: Count = Field(description="ranks that share each row's tokens")

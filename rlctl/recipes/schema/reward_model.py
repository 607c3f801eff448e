"""Section `reward.reward_model`: a model that scores responses, and its training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import Count, PositiveFloat, Section, UnusedIf
from rlctl.recipes.schema.model import FSDP, Model
from rlctl.recipes.schema.optim import Optim


class RewardModel(Section):
    """Settings of `reward.reward_model`."""

    enable: bool = Field(description="score responses with a model")
    model: Model
    weight: float = Field(
        description="weight of the model's score in the score of a response", allow_inf_nan=False
    )
    rule_weight: float = Field(
        description="weight of the reward functions' score; 0 = only report it, as the component "
        "`rule`",
        allow_inf_nan=False,
    )
    normalize: Literal["running", "model"] | None = Field(
        description="subtract a mean from the model's score and divide by a deviation: running = "
        "those of all responses so far, model = those that `train rm` wrote into its config.json; "
        "null = off"
    )
    max_length: Count | None = Field(
        description="longest conversation in tokens of the reward model, cut at its start; null = "
        "the model's context"
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches up to the token budget, sorted by length"
    )
    micro_batch_size_per_gpu: Annotated[Count | None, UnusedIf({".use_dynamic_bsz": True})] = Field(
        description="rows per forward pass and rank if use_dynamic_bsz is false; "
        "null = by token budget"
    )
    forward_max_token_len_per_gpu: Count = Field(description="token budget of a micro-batch")
    fsdp_config: FSDP
    optim: Optim
    ppo_mini_batch_size: Count = Field(
        description="pairs per update of `train rm`; divides data.train_batch_size"
    )
    grad_clip: PositiveFloat = Field(description="maximum gradient norm of `train rm`")

"""`algorithm`: which algorithm, advantages, KL, filters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    Floats,
    Fraction,
    KLKind,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    Text,
    Texts,
)


class KLControl(Section):
    type: Literal["fixed", "adaptive"] = Field(
        description="keep the coefficient, or steer the KL to target_kl"
    )
    kl_coef: NonNegativeFloat = Field(
        description="coefficient β of the KL in the reward (at first, when adaptive)"
    )
    horizon: Count = Field(description="rows over which the adaptive coefficient reacts")
    target_kl: PositiveFloat = Field(description="KL that the adaptive coefficient aims at")


class FilterGroups(Section):
    enable: bool = Field(
        description="DAPO's dynamic sampling: resample prompts whose answers all score the same"
    )
    metric: Text = Field(
        description="what must differ within a group: score, or a component of the reward by name"
    )
    max_num_gen_batches: Count = Field(
        description="most batches generated for one step before the run stops"
    )


class OverlongBuffer(Section):
    enable: bool = Field(description="DAPO's soft penalty for answers that near the limit")
    len: Count = Field(description="tokens before max_response_length in which the penalty grows")
    penalty_factor: NonNegativeFloat = Field(description="penalty at the limit")


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = Field(
        description="weigh tokens by π_train/π_rollout, per token or per row; null = off"
    )
    rollout_is_threshold: (
        PositiveFloat | Annotated[str, Field(pattern=r"^[\d.eE+-]+_[\d.eE+-]+$")]
    ) = Field(description="weights are cut off here; `lo_hi` = zero outside")
    rollout_rs: Text | None = Field(
        description="leave out tokens or rows by a divergence of trainer and engine: token, seq_sum, seq_mean or seq_max, each with "
        "_k1, _k2 or _k3, or several with commas; null = off"
    )
    rollout_rs_threshold: PositiveFloat | Text | None = Field(
        description="one entry a criterion: the ratio that stays in (k1; x means 1/x to x, or `lo_hi`), the largest divergence (k2, k3)"
    )


class Algorithm(Section):
    name: Text = Field(
        description="algorithm: ppo (the whole family), sft or a plug-in `module:Name`"
    )
    params: dict[str, Any] = Field(description="settings of the algorithm")
    adv_estimator: Text = Field(
        description="advantages by name: gae, grpo, rloo, … or a plug-in `module:name`"
    )
    adv_estimator_params: dict[str, Any] = Field(description="settings of the advantage estimator")
    gamma: Fraction = Field(description="discount γ of later rewards")
    lam: Fraction = Field(description="GAE's λ")
    norm_adv_by_std_in_grpo: bool = Field(
        description="divide by the group's standard deviation; false = Dr.GRPO"
    )
    gdpo_reward_keys: Texts | None = Field(
        description="gdpo: components of the reward that count; null = all"
    )
    gdpo_reward_weights: Floats | None = Field(
        description="gdpo: one weight for each of gdpo_reward_keys; null = 1 each"
    )
    use_kl_in_reward: bool = Field(
        description="subtract the KL to the reference from the token rewards"
    )
    kl_penalty: KLKind = Field(description="estimator of the KL in the reward")
    kl_ctrl: KLControl
    filter_groups: FilterGroups
    overlong_buffer: OverlongBuffer
    rollout_correction: RolloutCorrection

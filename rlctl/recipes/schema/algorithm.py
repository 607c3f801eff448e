"""Section `algorithm`: algorithm, advantages, KL, filters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    Text,
    UnusedIf,
)

_NO_WEIGHTS = UnusedIf({".rollout_is": None})
_NO_REJECTION = UnusedIf({".rollout_rs": None})
_OWN_LOG_PROBS = UnusedIf({".bypass_mode": False})
_CLIPPED = UnusedIf({".bypass_mode": True, ".loss_type": "ppo_clip"})


class KLControl(Section):
    """Controller of the KL coefficient in the reward."""

    type: Literal["fixed", "adaptive"] = Field(
        description="fixed = constant coefficient; adaptive = adjusted towards target_kl"
    )
    kl_coef: NonNegativeFloat = Field(
        description="coefficient β of the KL in the reward; the initial one if adaptive"
    )
    horizon: Annotated[Count, UnusedIf({".type": "fixed"})] = Field(
        description="time constant of the adaptive coefficient, in rows"
    )
    target_kl: Annotated[PositiveFloat, UnusedIf({".type": "fixed"})] = Field(
        description="target KL of the adaptive coefficient"
    )


class FilterGroups(Section):
    """DAPO's dynamic sampling."""

    enable: bool = Field(
        description="resample prompts whose responses all score the same (DAPO's dynamic sampling)"
    )
    metric: Text = Field(
        description="value that must differ within a group: score, or a reward component by name"
    )
    max_num_gen_batches: Count = Field(
        description="batches generated for one step before the run stops"
    )


class OverlongBuffer(Section):
    """DAPO's soft penalty for long responses."""

    enable: bool = Field(
        description="penalize responses close to the length limit (DAPO's soft penalty)"
    )
    len: Count = Field(description="tokens before max_response_length in which the penalty grows")
    penalty_factor: NonNegativeFloat = Field(description="penalty at the limit")


class RolloutCorrection(Section):
    """Correction of the difference between trainer and engine log-probs."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        description="importance weights π_train/π_rollout per token or per row; null = off"
    )
    rollout_is_batch_normalize: Annotated[bool, _NO_WEIGHTS, _CLIPPED] = Field(
        description="divide the bounded weights by their mean over the batch"
    )
    rollout_is_threshold: Annotated[
        PositiveFloat | Annotated[str, Field(pattern=r"^[\d.eE+-]+_[\d.eE+-]+$")], _NO_WEIGHTS
    ] = Field(description="upper bound of the weights; `lo_hi` = zero weight outside the range")
    rollout_rs: Text | None = Field(
        description="criteria that reject tokens or rows by divergence of trainer and engine: "
        "token, seq_sum, seq_mean or seq_max with _k1, _k2 or _k3, comma-separated; null = off"
    )
    rollout_rs_threshold_lower: Annotated[PositiveFloat | None, _NO_REJECTION] = Field(
        description="lower bound of the ratio of one k1 criterion; null = by rollout_rs_threshold"
    )
    rollout_token_veto_threshold: PositiveFloat | None = Field(
        description="reject rows in which a token has a ratio π_train/π_rollout below this; "
        "null = off"
    )
    rollout_rs_threshold: Annotated[PositiveFloat | Text | None, _NO_REJECTION] = Field(
        description="one entry per criterion, or one for all: accepted ratio (k1; x means 1/x to "
        "x, or `lo_hi`) or largest divergence (k2, k3)"
    )
    bypass_mode: bool | Literal["loglinear"] = Field(
        description="old log-probs without a separate pass: true = the engine's; loglinear = "
        "between the engine's and those in training, by the staleness of the token"
    )
    loss_type: Annotated[Literal["ppo_clip", "reinforce"], _OWN_LOG_PROBS] = Field(
        description="loss in bypass mode: ppo_clip = the configured policy loss, with the ratio to "
        "the engine; reinforce = −w·A·log π with the weights of rollout_is"
    )


class PFPPO(Section):
    """Policy filtration (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        description="weight of a row by its score: pow = |score| ** weight_pow; max_min = best and "
        "worst rows; max_random = best rows more often"
    )
    weight_pow: NonNegativeFloat = Field(description="exponent of the weights for pow")


class Algorithm(Section):
    """Settings of `algorithm`."""

    name: Text = Field(description="algorithm: ppo (the PPO family), sft, dpo, … or `module:Name`")
    params: dict[str, Any] = Field(description="settings of the algorithm")
    adv_estimator: Text = Field(
        description="advantage estimator: gae, grpo, rloo, … or `module:name`"
    )
    adv_estimator_params: dict[str, Any] = Field(description="settings of the advantage estimator")
    gamma: Fraction = Field(description="discount factor γ per token")
    lam: Fraction = Field(description="GAE's λ")
    norm_adv_by_std_in_grpo: bool = Field(
        description="divide by the group's standard deviation; false = Dr.GRPO"
    )
    use_kl_in_reward: bool = Field(
        description="subtract the KL to the reference from the token rewards"
    )
    kl_penalty: Annotated[Text, UnusedIf({".use_kl_in_reward": False})] = Field(
        description="estimator of the KL in the reward: kl, abs, mse, low_var_kl, …"
    )
    kl_ctrl: Annotated[KLControl, UnusedIf({".use_kl_in_reward": False})]
    use_pf_ppo: bool = Field(
        description="draw the rows of a step again with probabilities by score (PF-PPO)"
    )
    pf_ppo: Annotated[PFPPO, UnusedIf({".use_pf_ppo": False})]
    filter_groups: Annotated[FilterGroups, UnusedIf({"algorithm.filter_groups.enable": False})]
    overlong_buffer: Annotated[
        OverlongBuffer, UnusedIf({"algorithm.overlong_buffer.enable": False})
    ]
    rollout_correction: RolloutCorrection

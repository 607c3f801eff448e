"""Batches without a token to learn from, or without any token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.self_distill import SelfDistill, SelfDistillParams
from rlctl.runtime.batch import LogProbs, Ragged, Scored
from rlctl.runtime.training.mismatch import RolloutMismatch, check_rollout
from rlctl.runtime.training.step_metrics import length_metrics, speed_metrics
from tests.numerics.batches import scored_batch


def test_a_batch_whose_tokens_are_all_masked_is_no_mismatch() -> None:
    scored = scored_batch()
    far = LogProbs(scored.response_mask.like(-9 * torch.ones(9)), None)
    with pytest.raises(RolloutMismatch):
        check_rollout(scored, far, 0.1, cast(Any, None))
    masked = replace(scored, response_mask=scored.response_mask.like(torch.zeros(9)))
    check_rollout(masked, far, 0.1, cast(Any, None))


def test_responses_without_tokens_have_no_speed_per_token() -> None:
    none = Ragged.from_rows([[]] * 4, torch.int64)
    floats = none.like(torch.empty(0))
    scored = Scored(
        **{
            **vars(scored_batch()),
            "response_ids": none,
            "response_mask": floats,
            "rollout_log_probs": floats,
        }
    )
    found = speed_metrics({"gen": 1.0, "adv": 2.0}, scored, 3.0, 1)
    assert "timing_per_token_ms/gen" not in found
    assert found["timing_per_token_ms/adv"] == pytest.approx(2000 / 8)
    assert length_metrics(scored, 2)["global_seqlen/mean"] == 4.0


def test_self_distillation_refuses_episodes() -> None:
    config = compose("self_distill", ["actor_rollout_ref.rollout.multi_turn.enable=true"]).config
    with pytest.raises(ConfigError, match="self_distill is for single responses"):
        SelfDistill.from_config(config, 10, SelfDistillParams())

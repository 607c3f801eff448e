"""Keys that were set and have no effect are reported with the reason."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.recipes.keys import schema_keys
from rlctl.recipes.role_table import ROLES
from rlctl.recipes.unused_keys import report_unused_keys, unused_keys
from tests.plugin_folders import of_settings

FILES = ("data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m")
ROLLOUT = "actor_rollout_ref.rollout"


def unused(
    *overrides: str, recipe: str = "ppo_trainer", roles: set[str] | None = None
) -> list[str]:
    composed = compose(recipe, [*FILES, *overrides])
    found = [*composed.unused, *unused_keys(composed.container, composed.origins, roles)]
    return [str(each) for each in found]


def test_conditions_name_existing_keys() -> None:
    keys = {key.name for key in schema_keys().values() if key.kind != "section"}
    conditions = [each for key in schema_keys().values() for each in key.unused_if]
    assert conditions
    assert {cause for each in conditions for cause in each.causes} <= keys
    for role in ROLES:
        assert set(role.decided_by) <= keys
        for pattern in role.unused_keys:
            assert any(fnmatchcase(key, pattern) for key in keys), pattern


# Overrides, and what the report of one of them has.
REASONS = """
algorithm.kl_ctrl.kl_coef=0.001
  algorithm.kl_ctrl.kl_coef has no effect: algorithm.use_kl_in_reward is false
trainer.total_epochs=3 trainer.total_training_steps=7
  trainer.total_epochs has no effect: trainer.total_training_steps is 7
  (override trainer.total_training_steps=7)
actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.ref.fsdp_config.param_offload=true
  actor_rollout_ref.ref.fsdp_config.param_offload has no effect:
  actor_rollout_ref.model.lora_rank is 8 (override actor_rollout_ref.model.lora_rank=8)
  and trainer.placement.actor is main and trainer.placement.reference is main
trainer.test_freq=5
  trainer.test_freq has no effect: data.val_files is null
+reward.custom_reward_function.reward_kwargs.a=1
  reward.custom_reward_function.reward_kwargs.a has no effect:
  reward.custom_reward_function.path is null
ROLLOUT.name=hf ROLLOUT.enforce_eager=true trainer.device=cpu
  there are no CUDA graphs on a CPU
ROLLOUT.name=sglang +ROLLOUT.engine_kwargs.url=http://a:1 ROLLOUT.gpu_memory_utilization=0.4
  ROLLOUT.engine_kwargs.url is a running server
ROLLOUT.name=vllm trainer.device=cpu ROLLOUT.free_cache_engine=true
  ROLLOUT.name is vllm (override ROLLOUT.name=vllm): trainer.device is cpu
algorithm.name=sft algorithm.rollout_correction.rollout_is=token
  rollout_correction.rollout_is has no effect: algorithm.name is sft
  (override algorithm.name=sft)
""".replace("ROLLOUT", ROLLOUT)


# The same for verl's keys of plug-ins.
OF_PLUGINS = """
actor_rollout_ref.actor.tau_pos=2
  actor_rollout_ref.actor.tau_pos has no effect:
  actor_rollout_ref.actor.policy_loss.loss_mode is vanilla
algorithm.gdpo_reward_keys=[a]
  algorithm.gdpo_reward_keys has no effect: algorithm.adv_estimator is gae
"""


def cases(reasons: str) -> list[str]:
    return re.split(r"\n(?! )", reasons.strip())


@pytest.mark.parametrize("case", of_settings([case] for case in cases(REASONS)))
def test_report_gives_the_reason(case: str) -> None:
    check_reason(case)


@pytest.mark.plugin("bridges", "objectives")
@pytest.mark.parametrize("case", cases(OF_PLUGINS))
def test_report_gives_the_reason_of_a_key_of_a_plug_in(case: str) -> None:
    check_reason(case)


def check_reason(case: str) -> None:
    overrides, *reason = case.split("\n  ")
    [line] = unused(*overrides.split())
    assert " ".join(reason) in line


@pytest.mark.parametrize(
    "overrides",
    of_settings(
        [overrides]
        for overrides in [
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=false",
                "critic.ppo_micro_batch_size_per_gpu=4",
            ],
            ["actor_rollout_ref.actor.clip_ratio=.1", "actor_rollout_ref.actor.clip_ratio_high=.3"],
            ["data.val_files=[v.parquet]", "trainer.test_freq=5"],
            ["actor_rollout_ref.rollout.multi_turn.enable=false"],
            [
                f"{ROLLOUT}.name=vllm",
                f"{ROLLOUT}.gpu_memory_utilization=0.4",
                f"{ROLLOUT}.max_num_batched_tokens=512",
            ],
            [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.enforce_eager=true"],
            [
                "actor_rollout_ref.model.lora_rank=8",
                "trainer.placement.reference=far",
                "actor_rollout_ref.ref.fsdp_config.param_offload=true",
            ],
        ]
    ),
)
def test_used_keys_are_not_reported(overrides: list[str]) -> None:
    assert unused(*overrides) == []


def test_switch_of_a_higher_level_is_not_reported() -> None:
    assert unused("trainer.total_training_steps=5", recipe="gsm8k_ppo") == []
    [line] = unused("trainer.total_epochs=5", "trainer.total_training_steps=5", recipe="gsm8k_ppo")
    assert line.startswith("trainer.total_epochs has no effect")


def test_sections_of_roles_that_are_not_built_are_reported() -> None:
    overrides = (
        "algorithm.adv_estimator=grpo",
        "critic.optim.lr=1e-5",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9",
    )
    reference, critic = unused(*overrides, roles=set())
    grpo = "algorithm.adv_estimator is grpo (override algorithm.adv_estimator=grpo)"
    assert (
        critic
        == f"critic.optim.lr has no effect: no critic is built (algorithm.name is ppo, {grpo})"
    )
    assert "no reference is built" in reference
    assert "algorithm.use_kl_in_reward is false" in reference
    assert unused(*overrides, roles={"critic", "reference"}) == []


def test_strict_raises() -> None:
    composed = compose("ppo_trainer", [*FILES, "algorithm.kl_ctrl.kl_coef=0.001"])
    assert len(report_unused_keys(composed, None, strict=False)) == 1
    with pytest.raises(ConfigError, match="use_kl_in_reward is false"):
        report_unused_keys(composed, None, strict=True)

"""Table of roles: which roles a run needs, builds, and where."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from rlctl.recipes.roles import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD_LEARNER,
    REWARD_MODEL,
    ROLES,
    ROLLOUT,
    built_roles,
    engine_role,
    needed_roles,
    pool_names,
    rollout_pool,
    trained_role,
)
from rlctl.recipes.schema import Config
from rlctl.runtime.algorithms.base import Needs
from tests.configs import configured

ALL = Needs.ENGINE | Needs.REFERENCE | Needs.CRITIC


def config(*overrides: str) -> Config:
    files = ("data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m")
    return configured("ppo_trainer", files, overrides)


def test_every_role_names_existing_sections_and_workers() -> None:
    chosen = config()
    for role in ROLES:
        assert role.model(chosen).path
        assert (role.fsdp(chosen) is None) == (role.fsdp_key is None)
        assert role.needed_for is None or role.needed_for in Needs.__members__
        assert isinstance(resolve_name(role.worker), type)
        if role.passes is not None:
            assert role.max_tokens(chosen) > 0
        if role.learns:
            assert role.learner(chosen).ppo_mini_batch_size > 0


@pytest.mark.parametrize(
    ("needs", "roles"),
    [
        (Needs.NOTHING, [ACTOR]),
        (Needs.ENGINE, [ACTOR]),
        (Needs.CRITIC | Needs.GROUPS, [ACTOR, CRITIC]),
        (ALL, [ACTOR, REFERENCE, CRITIC]),
    ],
)
def test_needed_roles_follow_the_needs_of_the_algorithm(needs: Needs, roles: list[object]) -> None:
    assert needed_roles(config(), needs) == roles


def test_rollout_is_a_role_only_in_a_pool_of_its_own() -> None:
    own = config("trainer.placement.rollout=engines")
    shared = config("trainer.placement.rollout=main")
    assert engine_role(own, ALL) is ROLLOUT
    assert engine_role(shared, ALL) is ACTOR
    assert engine_role(own, Needs.CRITIC) is None
    assert rollout_pool(own, ALL) == "engines"
    assert rollout_pool(own, Needs.CRITIC) is None
    assert rollout_pool(shared, ALL) is None


def test_pool_names_are_those_of_needed_roles_with_the_actor_first() -> None:
    chosen = config("trainer.placement.rollout=engines", "trainer.placement.critic=values")
    assert pool_names(chosen, ALL) == ["main", "engines", "values"]
    assert pool_names(chosen, Needs.REFERENCE) == ["main"]


def test_a_reward_model_is_built_if_enabled_or_trained() -> None:
    enabled = config("reward.reward_model.enable=true", "trainer.placement.reward=values")
    assert needed_roles(enabled, ALL) == [ACTOR, REFERENCE, CRITIC, REWARD_MODEL]
    assert pool_names(enabled, Needs.CRITIC) == ["main", "values"]
    for chosen in (enabled, config()):
        assert needed_roles(chosen, Needs.REWARD_LEARNER) == [REWARD_LEARNER]
        assert trained_role(chosen, Needs.REWARD_LEARNER) is REWARD_LEARNER
    assert pool_names(enabled, Needs.REWARD_LEARNER) == ["values"]
    assert trained_role(enabled, ALL) is ACTOR


def test_actor_with_adapters_serves_as_reference_in_its_own_pool() -> None:
    lora = "actor_rollout_ref.model.lora_rank=4"
    assert built_roles(config(lora), ALL) == [ACTOR, CRITIC]
    assert built_roles(config(), ALL) == [ACTOR, REFERENCE, CRITIC]
    elsewhere = config(lora, "trainer.placement.reference=frozen")
    assert built_roles(elsewhere, ALL) == [ACTOR, REFERENCE, CRITIC]

"""Roles and their pools; composition of shipped recipes and documented commands, and origins."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlctl.plugins import load
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.keys import schema_keys
from rlctl.recipes.layers import leaves
from rlctl.recipes.role_table import (
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
from rlctl.recipes.search_path import LIBRARY, library_recipes
from rlctl.runtime.algorithms.base import Needs
from tests.configs import configured
from tests.documented import SWANLAB
from tests.plugin_folders import is_there, of_recipes

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
        if role.is_plugin and is_there("objectives"):
            assert load("roles", role.name)().check(chosen) is None
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


EXPERIMENTS = [name for name in library_recipes() if not name.endswith("_trainer")]
FILES = ["data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m"]


def values_by_origin(recipe: Recipe) -> dict[str, object]:
    """Return the value of each key's newest origin, with interpolations looked up by hand."""
    values: dict[str, object] = {}
    for key in leaves(recipe.container):
        value = recipe.origins[key][-1].value
        while isinstance(value, str) and value.startswith("${"):
            value = recipe.origins[value[2:-1]][-1].value
        values[key] = value
    return values


def test_schema_and_base_list_the_same_keys() -> None:
    base = compose("ppo_trainer", FILES)
    assert set(leaves(base.container)) == {
        key.name for key in schema_keys().values() if key.kind != "section"
    }
    assert all(key.help and key.type for key in schema_keys().values() if key.kind != "section")


@pytest.mark.parametrize("name", of_recipes(EXPERIMENTS))
def test_shipped_recipe_has_matching_origins_and_repeats_no_default(name: str) -> None:
    recipe = compose(name)
    assert values_by_origin(recipe) == leaves(recipe.container)
    assert recipe.notices == []
    for key, chain in recipe.origins.items():
        indices = [i for i, origin in enumerate(chain) if origin.level == 2]
        for i in indices:
            assert i == 0 or chain[i].value != chain[i - 1].value, (
                f"{chain[i].where} repeats {key} of {chain[i - 1].where}"
            )


@pytest.mark.plugin("bridges")
@pytest.mark.parametrize("name", ["ppo", "ppo_trainer"])
def test_swanlab_documentation_command_composes(name: str) -> None:
    recipe = compose(name, shlex.split(SWANLAB))
    config = recipe.config
    assert config.trainer.logger == ("console", "swanlab")
    assert config.trainer.val_before_train is False
    assert config.trainer.log_val_generations == 1
    assert config.data.val_batch_size == 1312
    assert config.data.train_files == ("$HOME/data/gsm8k/train.parquet",)
    assert (config.actor_rollout_ref.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    renamed, dropped, *implied = recipe.notices
    assert renamed == "val_generations_to_log_to_wandb is now trainer.log_val_generations"
    assert dropped == "trainer.default_hdfs_dir=null is dropped: it is not set"
    assert len(implied) == 4  # verl's meaning of the four micro-batch keys


def test_origins_list_every_setting_of_a_key() -> None:
    chain = compose("gsm8k_grpo_lora", ["+actor_rollout_ref.actor.optim.lr=5e-5"]).origins[
        "actor_rollout_ref.actor.optim.lr"
    ]
    assert [origin.value for origin in chain] == [1e-6, 3e-5, 5e-5]
    assert [origin.level for origin in chain] == [1, 2, 3]
    for origin, file in zip(chain, ["actor/dp_actor.yaml", "gsm8k_grpo_lora.yaml"], strict=False):
        path, _, line = origin.where.rpartition(":")
        assert Path(path).resolve() == LIBRARY / file
        assert (
            Path(path)
            .read_text(encoding="utf-8")
            .splitlines()[int(line) - 1]
            .strip()
            .startswith("lr:")
        )
    assert chain[-1].where == "override +actor_rollout_ref.actor.optim.lr=5e-5"

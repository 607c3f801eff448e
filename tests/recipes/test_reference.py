"""Reference page, suggestions, key table and completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs.keys import keys
from rlctl import plugins
from rlctl.recipes.completion import complete_key, complete_override, complete_recipe
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.reference import key_rows
from rlctl.recipes.slots import SLOTS
from rlctl.suggest import nearest


def test_the_page_of_keys_has_every_key_and_plug_in() -> None:
    page = keys()
    for row in key_rows():
        section, _, name = row.key.name.rpartition(".")
        assert f"\n## {section}\n" in page, row.key.name
        assert f"\n| `{name}` |" in page, row.key.name
    for slot in SLOTS:
        assert all(f"\n* `{name}`: " in page for name in plugins.names(slot.kind)), slot.kind
    assert "\n  * `tau_pos` = `1.0`: " in page


def test_nearest_names_are_sorted() -> None:
    known = ["trainer.seed", "data.seed", "trainer.nnodes", "reward"]
    assert nearest("trainer.sed", known, limit=1) == ["trainer.seed"]
    assert nearest("seed", known) == ["data.seed", "trainer.seed"]
    assert nearest("completely.else", known) == []


def test_types_in_words() -> None:
    words = {
        name: known_key(name)
        for name in (
            "trainer.seed",
            "data.train_max_samples",
            "trainer.device",
            "critic.optim.betas",
        )
    }
    assert [key.type if key else None for key in words.values()] == [
        "whole number ≥ 0 and ≤ 4294967295",
        "whole number -1 or ≥ 1",
        "auto | cpu | cuda",
        "list of 2 numbers ≥ 0 and < 1",
    ]
    assert known_key("reward.custom_reward_function.reward_kwargs.x.y") == known_key(
        "reward.custom_reward_function.reward_kwargs"
    )
    assert known_key("trainer.seed.x") is None


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("tr", ["trainer."]),
        ("trainer.to", ["trainer.total_epochs=", "trainer.total_training_steps="]),
        ("+data.sh", ["+data.shuffle="]),
        ("trainer.device=c", ["trainer.device=cpu", "trainer.device=cuda"]),
        ("data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
        ("trainer.keep_best.metric=", ["trainer.keep_best.metric=null"]),
        ("trainer.logger=[console,j", ["trainer.logger=[console,jsonl"]),
        ("actor_rollout_ref.rollout.name=h", ["actor_rollout_ref.rollout.name=hf"]),
        ("trainer.nothing=", []),
        ("nothing", []),
    ],
)
def test_completion_of_overrides(begun: str, offered: list[str]) -> None:
    assert complete_override(begun) == offered


def test_completion_reaches_every_key() -> None:
    reached, todo = set(), [""]
    while todo:
        for offer in complete_override(todo.pop()):
            reached.add(offer.rstrip(".="))
            if offer.endswith("."):
                todo.append(offer)
    assert reached >= {key.name for key in schema_keys().values() if key.kind != "open"}


def test_completion_of_keys_and_recipes(tmp_path: Path) -> None:
    assert complete_key("trainer.val_b") == ["trainer.val_before_train"]
    assert complete_key("use_kl") == [
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.use_kl_in_reward",
    ]
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mod").mkdir()
    (tmp_path / ".hidden").mkdir()
    assert complete_recipe("gsm8k_g") == ["gsm8k_grpo", "gsm8k_grpo_lora"]
    assert complete_recipe(f"{tmp_path}/") == [f"{tmp_path}/mine.yaml", f"{tmp_path}/mod/"]


def test_completion_imports_no_slow_module() -> None:
    code = (
        "import sys; from rlctl.recipes.completion import complete_override as f; "
        "f('tr'); f('trainer.logger='); f('algorithm.adv_estimator='); "
        "f('actor_rollout_ref.rollout.name='); print(*sys.modules)"
    )
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert not loaded & {
        "hydra",
        "omegaconf",
        "torch",
        "ray",
        "transformers",
        "pandas",
        "pyarrow",
        "rich",
        "typer",
    }

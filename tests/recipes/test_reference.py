"""Reference page, suggestions, key table and completion."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.keys import keys
from rlctl import plugins
from rlctl.recipes.completion import complete_key, complete_override, complete_recipe
from rlctl.recipes.keys import schema_keys
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

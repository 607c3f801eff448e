"""`rlctl config` and `rlctl recipes` through their own entry; the page of keys and completion."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from docs.keys import keys
from rlctl import plugins
from rlctl.__main__ import main
from rlctl.recipes.completion import complete_override
from rlctl.recipes.compose import compose
from rlctl.recipes.key_reference import key_rows
from rlctl.recipes.keys import schema_keys
from rlctl.recipes.search_path import library_recipes
from rlctl.recipes.slots import SLOTS
from rlctl.runs.run_dir import RunDir
from rlctl.suggest import nearest
from tests.plugin_folders import can_train, is_there
from tests.small_disk import fill, small_disk

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, command: str) -> str:
    """Return the standard output of a command that succeeds."""
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


def test_why_prints_the_chain_newest_first(capsys: Captured) -> None:
    key = "actor_rollout_ref.actor.optim.lr"
    lines = run(capsys, f"config why {key} -r gsm8k_grpo_lora +{key}=1").splitlines()
    assert lines[0] == "actor_rollout_ref.actor.optim.lr = 1"
    assert [line.split()[0] for line in lines[3:]] == ["1", "3e-05", "1e-06"]
    assert "override +actor_rollout_ref.actor.optim.lr=1" in lines[3]
    assert "gsm8k_grpo_lora.yaml:12" in lines[4]


def test_why_reports_references_and_unused_keys(capsys: Captured) -> None:
    chain = run(capsys, "config why critic.ppo_epochs")
    assert "rlctl config why actor_rollout_ref.actor.ppo_epochs" in chain
    command = "config why kl_coef -r gsm8k_ppo algorithm.kl_ctrl.kl_coef=0.1 --json"
    shown = json.loads(run(capsys, command))
    assert shown["key"] == "algorithm.kl_ctrl.kl_coef"
    assert shown["origins"][0] == {
        "value": 0.1,
        "where": "override algorithm.kl_ctrl.kl_coef=0.1",
        "level": 3,
    }
    assert shown["no_effect"] == "algorithm.use_kl_in_reward is false"


def test_why_refuses_sections_and_unknown_or_ambiguous_keys(capsys: Captured) -> None:
    assert main(["config", "why", "optim.lr"]) == 4
    assert "actor_rollout_ref.actor.optim.lr or critic.optim.lr" in capsys.readouterr().err
    assert main(["config", "why", "critic.optim"]) == 2
    assert main(["config", "why", "trainer.sed"]) == 4
    assert "did you mean trainer.seed" in capsys.readouterr().err


def test_show_as_yaml_can_be_read_back(capsys: Captured) -> None:
    shown = run(capsys, "config show -r grpo --yaml")
    assert yaml.safe_load(shown) == compose("grpo").container


def test_show_changed_values_with_their_origins(capsys: Captured) -> None:
    options = "-r gsm8k_grpo_lora --changed --origin --json trainer.seed=1 data.seed=2"
    shown = json.loads(run(capsys, f"config show {options}"))
    origins = compose("gsm8k_grpo_lora").origins
    changed = {key for key, chain in origins.items() if chain[-1].level == 2}
    assert set(shown) == changed | {"data.seed"}
    assert shown["data.seed"] == {"value": 2, "where": "override data.seed=2"}
    shown = json.loads(run(capsys, "config show --json '*.optim.lr'"))
    assert list(shown) == ["actor_rollout_ref", "critic", "reward"]
    assert main(["config", "show", "qqqqqqqq"]) == 4


def test_keys_finds_words_and_misspelled_keys(capsys: Captured) -> None:
    everything = json.loads(run(capsys, "config keys --json"))
    assert [row["key"] for row in everything] == [
        key.name for key in schema_keys().values() if key.kind != "section"
    ]
    [row] = json.loads(run(capsys, "config keys --json trainer max_skip"))
    assert row == {
        "key": "trainer.max_skipped_updates",
        "type": "whole number ≥ 1",
        "default": "5",
        "help": schema_keys()["trainer.max_skipped_updates"].help,
    }
    assert "trainer.total_epochs" in run(capsys, "config keys trainer.totalepoch")


def test_diff_of_two_recipes(capsys: Captured) -> None:
    rows = json.loads(run(capsys, "config diff gsm8k_grpo gsm8k_grpo_lora --json"))
    assert {row["key"]: (row["a"], row["b"]) for row in rows} == {
        "actor_rollout_ref.model.lora_rank": (0, 32),
        "actor_rollout_ref.model.lora_alpha": (16, 32),
        "actor_rollout_ref.actor.optim.lr": (1e-6, 3e-5),
    }
    assert run(capsys, "config diff ppo ppo") == ""
    table = run(capsys, "config diff ppo_trainer ppo")
    assert re.search(r"actor_rollout_ref.model.path +\(required\) +quickstart", table), (
        "a base need not be complete"
    )


def test_config_commands_accept_a_stored_run(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = compose("ppo", ["trainer.seed=9"])
    folder = RunDir.create(tmp_path / "runs", "project", "stored", "ppo")
    folder.write_config(yaml.safe_dump(recipe.container), recipe.origins)
    monkeypatch.chdir(tmp_path)
    [row] = json.loads(run(capsys, "config diff ppo stored --json"))
    assert row == {"key": "trainer.seed", "a": 1, "b": 9}
    shown = json.loads(run(capsys, "config why trainer.seed -r @last --json"))
    assert [origin["value"] for origin in shown["origins"]] == [9, 1]
    shown = run(capsys, f"config show -r {folder.path}/config.yaml --json")
    assert json.loads(shown) == recipe.container
    assert main(["config", "show", "-r", "stored", "trainer.seed=1"]) == 2
    assert main(["config", "show", "-r", "nobody"]) == 4


def test_recipes_ls_show_and_cp(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.loads(run(capsys, "recipes ls --json"))
    assert [row["name"] for row in listed] == list(library_recipes())
    about = {row["name"]: row["about"] for row in listed}
    assert all(about.values())
    assert about["dr_grpo"].startswith("The quickstart with Dr. GRPO (")
    text = library_recipes()["gsm8k_ppo"].read_text()
    assert run(capsys, "recipes show gsm8k_ppo") == text
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "recipes cp gsm8k_ppo").strip() == "gsm8k_ppo.yaml"
    assert Path("gsm8k_ppo.yaml").read_text(encoding="utf-8") == text
    assert main(["recipes", "cp", "gsm8k_ppo"]) == 5
    assert main(["recipes", "cp", "grpo", "gsm8k_ppo.yaml", "--force"]) == 0
    assert compose("gsm8k_ppo.yaml").container == compose("grpo").container
    assert main(["recipes", "cp", "grpo", "no/such/folder.yaml"]) == 4


def test_a_copy_that_does_not_fit_leaves_no_file(capsys: Captured, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        filler = fill(disk)
        assert main(["recipes", "cp", "grpo", str(disk / "mine.yaml")]) == 7
        assert "cannot write the recipe: No space left on device" in capsys.readouterr().err
        assert [each.name for each in disk.iterdir()] == ["filler"]
        filler.unlink()
        assert main(["recipes", "cp", "grpo", str(disk / "mine.yaml")]) == 0


def test_recipes_check_passes_shipped_recipes_only(capsys: Captured, tmp_path: Path) -> None:
    names = [name for name in library_recipes() if not name.endswith("_trainer")]
    refused = 0 if all(map(can_train, names)) else 3  # those of folders that were deleted
    assert main(["recipes", "check", "--json"]) == refused
    checks = json.loads(capsys.readouterr().out)
    assert [check["recipe"] for check in checks] == names
    passed = [check["recipe"] for check in checks if check["ok"]]
    assert passed == names or refused
    assert {*filter(can_train, names)} <= {*passed}
    assert [check["no_effect"] for check in checks] == [[]] * len(names)
    assert run(capsys, "recipes check grpo").split() == ["ok", "grpo"]
    unused = tmp_path / "unused.yaml"
    unused.write_text("defaults: [gsm8k_grpo, _self_]\ncritic: {optim: {lr: 1.0}}\n")
    [report] = json.loads(run(capsys, f"recipes check {unused} --json"))
    assert report["ok"]
    assert report["no_effect"][0].startswith("critic.optim.lr has no effect: no critic is built")
    assert main(["recipes", "check", "--strict", str(unused)]) == 3
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("defaults: [ppo, _self_]\nalgorithm: {adv_estimator: gea}\n")
    assert main(["recipes", "check", "grpo", str(wrong)]) == 3
    assert "gea" in capsys.readouterr().err


def test_the_page_of_keys_has_every_key_and_plug_in() -> None:
    page = keys()
    for row in key_rows():
        section, _, name = row.key.name.rpartition(".")
        assert f"\n## {section}\n" in page, row.key.name
        assert f"\n| `{name}` |" in page, row.key.name
    for slot in SLOTS:
        assert all(f"\n* `{name}`: " in page for name in plugins.names(slot.kind)), slot.kind
    if is_there("objectives"):
        assert "\n  * `tau_pos` = `1.0`: " in page


def test_nearest_names_are_sorted() -> None:
    known = ["trainer.seed", "data.seed", "trainer.nnodes", "reward"]
    assert nearest("trainer.sed", known, limit=1) == ["trainer.seed"]
    assert nearest("seed", known) == ["data.seed", "trainer.seed"]
    assert nearest("completely.else", known) == []


def test_completion_reaches_every_key() -> None:
    reached, todo = set(), [""]
    while todo:
        for offer in complete_override(todo.pop()):
            reached.add(offer.rstrip(".="))
            if offer.endswith("."):
                todo.append(offer)
    assert reached >= {key.name for key in schema_keys().values() if key.kind != "open"}

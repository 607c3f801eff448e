"""Trust in stored configurations: own runs need no word, copies need it for code and places."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.recipes.layers import leaves
from rlctl.runs import trust
from rlctl.runs.ownership import Place, own_folder
from rlctl.runs.run_dir import RunDir
from rlctl.runs.trust import check, guarded, is_own, recompose_run
from tests.plugin_folders import can_train

CODE = {"reward": {"custom_reward_function": {"path": "score.py", "name": "compute_score"}}}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.delenv(trust.TRUSTED_VARIABLE, raising=False)


def made(root: Path, config: dict[str, Any] | None = None) -> RunDir:
    with RunDir.creating(root / "runs", "p", "r", "ppo") as run:
        run.write_config(yaml.safe_dump(CODE if config is None else config), {})
    return run


def copied(run: RunDir, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.path, tmp_path / "copied" / "p" / "r", symlinks=True))


def test_own_runs_need_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a move, from another host of the disk, and after another attempt."""
    run = made(tmp_path / "A")
    check(run.path)
    run.finish("stopped", 0)
    moved = (tmp_path / "A").rename(tmp_path / "B") / "runs" / "p" / "r"
    check(moved)
    RunDir.reopen(moved).finish("stopped", 0)
    check(moved)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    with pytest.raises(ConfigError):
        check(moved)  # the folder and the host have changed
    moved.parents[2].rename(tmp_path / "A")
    check(run.path)


def test_code_of_a_copy_needs_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path)
    copy = copied(run, tmp_path)
    with pytest.raises(ConfigError, match="the run 'r' was not made by you") as refused:
        check(copy)
    assert "reward.custom_reward_function.path=score.py" in str(refused.value)
    assert "--trust" in str(refused.value.problems[0].hint)
    with pytest.raises(ConfigError):
        recompose_run(copy)
    check(copy, ["reward.custom_reward_function.path=mine.py"])
    with pytest.raises(ConfigError):
        check(copy, ["reward.custom_reward_function.name=f"])
    settings = tmp_path / "CONFIG" / "rlctl" / "trusted_folders"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"# mine\n{tmp_path}/other\n{tmp_path}/copied/\n")
    check(copy)
    settings.write_text("\n\n.\n")
    with pytest.raises(ConfigError):
        check(copy)
    monkeypatch.setenv(trust.TRUSTED_VARIABLE, f"/nowhere{os.pathsep}{tmp_path}/copied")
    check(copy)


def test_links_out_of_a_copy_need_a_word(tmp_path: Path) -> None:
    run = made(tmp_path, {"trainer": {"seed": 1}})
    copy = copied(run, tmp_path)
    (copy / "wandb").mkdir()
    (copy / "wandb" / "latest").symlink_to("run-1")
    (copy / "wandb" / "debug.log").symlink_to(tmp_path / "log")  # as W&B's SDK makes them
    check(copy)
    (copy / "exports").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="the link exports"):
        check(copy)


def test_a_confirmed_copy_is_own_from_then_on(tmp_path: Path) -> None:
    original = made(tmp_path)
    original.finish("stopped", 0)
    run = RunDir.reopen(copied(original, tmp_path))
    assert not is_own(run.path)
    run.write_config(yaml.safe_dump(CODE), {})
    assert is_own(run.path)
    assert is_own(original.path)


def test_an_edited_or_exchanged_configuration_is_not_own(tmp_path: Path) -> None:
    run = made(tmp_path, {"trainer": {"seed": 1}})
    check(run.path)
    (run.path / "config.yaml").write_text(yaml.safe_dump(CODE))
    run.update(config_sha256=None)
    with pytest.raises(ConfigError):
        check(run.path)


def test_a_list_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    run = made(tmp_path)
    (tmp_path / "STATE" / "rlctl" / "runs").chmod(0o777)
    assert not is_own(run.path)


@pytest.mark.parametrize("run_id", ["../x", "*", "", "a/b"])
def test_ids_are_no_paths(run_id: str, tmp_path: Path) -> None:
    made(tmp_path)
    assert own_folder(Place.of(run_id, tmp_path / "runs" / "p" / "r")) is None


def test_a_state_folder_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert not is_own(made(tmp_path).path)


@pytest.mark.parametrize(
    "setting",
    [
        {"actor_rollout_ref.model.trust_remote_code": True},
        {"actor_rollout_ref.model.trust_remote_code": "${data.shuffle}"},
        {"custom_reward_function.path": "x"},
        {"reward.functions": ["math", "score.py:f"]},
        {"reward.functions": ["a b.py:f"]},
        {"algorithm.name": "module:Name"},
        {"algorithm.name": "${trainer.tracking.description}"},
        {"algorithm.adv_estimator": "a:${data.prompt_key}"},
        {"trainer.logger": ["console", "mine:Tracker"]},
        {"data.sampler": "mine:Sampler"},
        {"actor_rollout_ref.rollout.name": "mine:Engine"},
        {"actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml"},
        {"actor_rollout_ref.rollout.multi_turn.function_tool_path": "tools.py"},
        {"actor_rollout_ref.rollout.agent.python": "/usr/bin/python"},
        {"actor_rollout_ref.rollout.agent.params": {"mcp": "servers.json"}},
        {"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls": "mine.Worker"},
        {"actor_rollout_ref.model.override_config.attn_implementation": "org/kernel"},
        {"actor_rollout_ref.actor.optim.optimizer_impl": "mine"},
        {"actor_rollout_ref.actor.optim.optimizer_impl": "${data.prompt_key}"},
        {"ray_kwargs.ray_init.address": "10.0.0.1:6379"},
        {"ray_kwargs.ray_init.runtime_env": {"pip": ["x"]}},
        {"trainer.run_dir": "/home/me"},
        {"reward.params": {"judge": {"base_url": "http://x/v1"}}},
        {"data.train_files": ["${oc.env:SECRET}"]},
        {"hydra.searchpath": ["file:///evil"]},
        {"defaults.x": "evil"},
    ],
)
def test_guarded_settings(setting: dict[str, Any]) -> None:
    assert len(guarded(leaves(setting))) == 1


def test_settings_of_the_shipped_recipes_are_not_guarded() -> None:
    given = ["data.train_files=[openai/gsm8k:train]", "actor_rollout_ref.model.path=org/model"]
    given += ["trainer.tracking.tags=[team:rl]", "trainer.experiment_name=x"]
    for name in filter(can_train, ("ppo", "grpo", "tools", "dapo", "gsm8k_grpo_lora", "sft")):
        assert guarded(leaves(compose(name, given).recorded)) == {}, name


def test_every_stored_configuration_is_composed_after_the_check() -> None:
    """`recompose` itself is used by nothing but `recompose_run`."""
    package = Path(trust.__file__).parents[1]
    users = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "import" in (text := path.read_text()) and "recorded_config import" in text
        for line in text.splitlines()
        if "recorded_config import" in line and "recompose" in line
    ]
    assert users == ["runs/trust.py"]

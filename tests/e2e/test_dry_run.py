"""`--dry-run`: figures computed by hand, all problems at once, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.__main__ import main

Capsys = pytest.CaptureFixture[str]


def report(capsys: Capsys, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["train", *arguments, "--dry-run", "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_step_arithmetic(settings: list[str], capsys: Capsys) -> None:
    found = report(
        capsys,
        "grpo",
        *settings,
        "actor_rollout_ref.rollout.n=6",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
    )["batches"]
    assert (found["prompts"], found["answers_a_prompt"], found["rows"]) == (8, 6, 48)
    names = ("train_prompts", "steps_per_epoch", "total_steps", "val_prompts")
    assert [found[name] for name in names] == [64, 8, 2, 8]
    (actor,) = found["updates"]
    # 4 prompts × 6 = 24 rows, 12 on each of two ranks, five at a time: 5 + 5 + 2
    assert (actor["mini_batches"], actor["rows"], actor["rows_a_rank"]) == (2, 24, 12)
    assert (actor["micro_batches_half"], actor["micro_batches_full"]) == (3, 3)
    assert (actor["epochs"], actor["updates"]) == (2, 4)


def test_micro_batches_follow_the_token_budget(settings: list[str], capsys: Capsys) -> None:
    budget = 300
    tokens = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}"
    found = report(capsys, "ppo", *settings, tokens, "trainer.device=cpu")["batches"]
    actor, critic = found["updates"]
    mean = found["mean_prompt_length"]
    assert 12 < mean < 160
    assert actor["micro_batches_full"] == -(-4 // int(budget // (mean + 12)))
    assert actor["micro_batches_half"] == -(-4 // int(budget // (mean + 6)))
    assert critic["role"] == "critic"


def test_memory_of_a_tiny_model(settings: list[str], capsys: Capsys) -> None:
    """Compare memory figures of a Qwen2 with two layers of 32 with values computed by hand.

    Gated MLP of 64, 4 heads of 8 over 2, 259 tokens, tied head, query/key/value biases, float32.
    """
    more = ["algorithm.use_kl_in_reward=true", "trainer.device=cpu", "trainer.save_freq=1"]
    found = report(capsys, "ppo", *settings, *more)
    attention = (32 * 32 + 32) + 2 * (32 * 16 + 16) + 32 * 32
    backbone = 259 * 32 + 2 * (attention + 3 * 32 * 64 + 2 * 32) + 32
    actor, reference, critic = (
        next(each for each in found["memory"] if each["role"] == role)
        for role in ("actor", "reference", "critic")
    )
    assert actor["num_parameters"] == reference["num_parameters"] == backbone
    assert critic["num_parameters"] == backbone + 32 + 1
    assert actor["parameters"] == actor["gradients"] == 4 * backbone
    assert actor["moments"] == 8 * backbone
    assert (reference["gradients"], reference["moments"]) == (0, 0)
    tokens = 4 * (160 + 12)  # a mini-batch of four longest rows is less than the budget
    a_token = 6 * 32 + 2 * 32 + 2 * 16 + 4 * 64
    assert actor["activations"] == 2 * tokens * a_token * 4
    assert reference["activations"] == 2 * tokens * a_token * 4  # one layer, but eight rows
    assert actor["logits"] == 2 * tokens * 259 * 4
    assert critic["logits"] == 0
    # keys and values, layers, sizes, eight rows
    assert actor["engine"]["cache"] == 2 * 2 * 16 * 8 * (160 + 12) * 4
    held = sum(each["parameters"] + each["moments"] for each in (actor, reference, critic))
    passing = [
        max(each["engine"]["cache"], each["gradients"] + each["activations"] + each["logits"])
        for each in (actor, reference, critic)
    ]
    assert found["pool_peaks"] == {"main": held + max(passing)}
    assert found["disk"]["checkpoint"] == 4 * (4 * backbone + 3 * (backbone + 33))
    assert found["disk"]["num_checkpoints"] == 2


def test_dry_run_and_start_report_all_problems(
    settings: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    raise KeyError('gold')\n"
    )
    wrong = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "trainer.logger=[consle:Tracker]",
        "data.val_files=nowhere.parquet",
        "data.max_response_length=1000",
        "trainer.experiment_name=.mine",
        "reward.custom_reward_function.path=mine.py",
    ]
    found = report(capsys, "ppo", *settings, *wrong, code=3)
    assert not found["ok"]
    messages = "\n".join(each["message"] + str(each["where"]) for each in found["problems"])
    wanted = ("ppo_mini_batch_size=3", "consle", "nowhere.parquet", "context is 256", "'.mine'")
    assert all(words in messages for words in (*wanted, "KeyError: 'gold'"))
    assert main(["train", "ppo", *settings, *wrong]) == 3
    talk = capsys.readouterr().err
    assert all(each["message"] in talk for each in found["problems"])
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_dry_run_of_the_quickstart_writes_nothing(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["train", "grpo", "--dry-run", "data.seed=7"]) == 0
    assert not list(tmp_path.iterdir())
    assert "data.seed" in capsys.readouterr().out


def test_unused_keys_and_changed_values(settings: list[str], capsys: Capsys) -> None:
    found = report(capsys, "grpo", *settings, "algorithm.kl_ctrl.kl_coef=0.1")
    assert any("algorithm.kl_ctrl.kl_coef has no effect" in line for line in found["idle"])
    changed = {each["key"]: each for each in found["changed"]}
    assert changed["algorithm.kl_ctrl.kl_coef"] == {
        "key": "algorithm.kl_ctrl.kl_coef",
        "value": 0.1,
        "where": "override algorithm.kl_ctrl.kl_coef=0.1",
    }
    assert not report(
        capsys, "grpo", *settings, "algorithm.kl_ctrl.kl_coef=0.1", "--strict", code=3
    )["ok"]


def test_json_requires_dry_run(settings: list[str], capsys: Capsys) -> None:
    assert main(["train", "ppo", *settings, "--json"]) == 2
    assert "--dry-run" in capsys.readouterr().err

"""Bad input: one clear error before anything starts, its exit code, and nothing left behind.

`--dry-run` has figures computed by hand, and all problems at once.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.__main__ import main
from rlctl.installer import adapted
from tests.e2e.command import rlctl
from tests.settings import given

pytestmark = pytest.mark.usefixtures("here")
Capsys = pytest.CaptureFixture[str]


def broken_reward(folder: Path) -> str:
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    return f"reward.custom_reward_function.path={folder}/broken.py"


def not_parquet(folder: Path) -> str:
    (folder / "text.parquet").write_text("not parquet at all")
    return f"data.train_files={folder}/text.parquet"


CASES = {
    "not parquet": (not_parquet, 3, "text.parquet"),
    "long prompts": (
        ["data.max_prompt_length=8", "data.filter_overlong_prompts=false"],
        3,
        "data.max_prompt_length=8",
    ),
    "all too long": ("data.max_prompt_length=8", 3, "no prompt is left"),
    "reward file": (broken_reward, 3, "broken.py"),
    "no GPU": ("trainer.device=cuda", 7, "GPU"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gives_one_clear_error(
    case: str, settings: list[str], here: Path, capsys: Capsys
) -> None:
    make, code, wanted = CASES[case]
    spoilt = make(here) if callable(make) else make
    overrides = spoilt if isinstance(spoilt, list) else [spoilt]
    assert main(["train", "ppo", *settings, *overrides]) == code
    talk = capsys.readouterr().err
    begin, *lines = talk.splitlines()
    assert begin == "checking the configuration …"
    first = next(line for line in lines if not line.startswith(("note: ", "warning: ")))
    assert first.startswith("error: "), talk
    assert wanted in talk
    assert "Traceback" not in talk
    assert not (here / "runs").exists()


def test_missing_package_of_a_logger_exits_6_with_the_install_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    # An earlier test may have imported the tracker while its package was there.
    monkeypatch.delitem(sys.modules, "rlctl.tracking.wandb", raising=False)
    command = adapted("pip install 'rlctl[wandb]'")
    assert main(["train", "ppo", "-l", "wandb"]) == 6
    assert f"help: {command}\n" in capsys.readouterr().err
    assert not (here / "runs" / "quickstart").exists()


def test_too_little_disk_space_is_refused(
    shelf: Path, settings: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    """Pretend that the model's weights are eight terabytes with a sparse file."""
    model = tmp_path / "model"
    shutil.copytree(shelf / "model", model)
    with (model / "more.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    overrides = given(model=model, save=1, runs=f"{tmp_path}/runs")
    assert main(["train", "ppo", *settings, *overrides]) == 7
    assert "MiB free" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ray_start_timeout(settings: list[str], tmp_path: Path) -> None:
    late = "trainer.timeouts.ray_start_s=0.05"
    done = rlctl("train", "ppo", *settings, late, cwd=tmp_path, code=7)
    assert "Ray did not start within 0.05 s" in done.stderr
    record = json.loads(next((tmp_path / "runs").glob("quickstart/*/run.json")).read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 7)


def report(capsys: Capsys, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["train", *arguments, "--dry-run", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_step_arithmetic(settings: list[str], capsys: Capsys) -> None:
    sizes = ("ppo_epochs=2", "use_dynamic_bsz=false", "ppo_micro_batch_size_per_gpu=5")
    own = [f"actor_rollout_ref.actor.{each}" for each in sizes]
    words = (*settings, *own, *given(n=6, ranks=2, device="cpu"))
    found = report(capsys, "grpo", *words)["batches"]
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
        "data.max_response_length=1000",
        "reward.custom_reward_function.path=mine.py",
    ]
    found = report(capsys, "ppo", *settings, *wrong, code=3)
    assert not found["ok"]
    messages = "\n".join(each["message"] + str(each["where"]) for each in found["problems"])
    wanted = ("ppo_mini_batch_size=3", "consle", "context is 256")
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
    strict = ("algorithm.kl_ctrl.kl_coef=0.1", "--strict")
    assert not report(capsys, "grpo", *settings, *strict, code=3)["ok"]


def test_json_requires_dry_run(settings: list[str], capsys: Capsys) -> None:
    assert main(["train", "ppo", *settings, "--json"]) == 2
    assert "--dry-run" in capsys.readouterr().err

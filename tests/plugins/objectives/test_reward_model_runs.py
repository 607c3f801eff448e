"""Runs that train a reward model, and a policy on its scores: metrics, exact resume, errors."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner, Result

from rlctl import api
from rlctl.cli import app
from rlctl.data_prep.arithmetic_pairs import arithmetic_pairs
from rlctl.data_prep.rows import read_rows, write_rows
from rlctl.errors import RlctlError, UsageError
from rlctl.recipes.compose import compose
from rlctl.runs.store import RunStore
from rlctl.runtime.export import export, rebuild
from rlctl.runtime.planning.plan import make_plan
from tests.e2e.command import metrics as rows_of
from tests.models import write_tiny_model
from tests.settings import given

CHOSEN_AND_REJECTED = ("chosen_response", "rejected_response")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, pairs, and the run `rm` of three steps."""
    folder = tmp_path_factory.mktemp("root")
    write_tiny_model(folder / "model")
    for split, rows in arithmetic_pairs(16, 6, seed=0).items():
        write_rows(folder / f"{split}.parquet", rows)
    model = f"reward.reward_model.model.path={folder}/model"
    own = (model, "reward.reward_model.optim.lr=1e-3", *given(steps=3))
    api.train(compose("rm_trainer", settings(folder, "rm", *own)), inline=True)
    return folder


def settings(root: Path, name: str, *overrides: str) -> list[str]:
    train, val = (f"{root}/{split}.parquet" for split in ("train", "val"))
    files = given(train=train, val=val, runs=f"{root}/runs", name=name, project="p", logger=[])
    return [*files, *given(prompt=200, batch=4, save=1, validate=2), *overrides]


def policy(root: Path) -> tuple[str, ...]:
    own = given(model=f"{root}/model", mini_batch=4, response=6)
    return (*own, "reward.reward_model.enable=true")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}/huggingface/model.safetensors")


def assert_equal_weights(run: Path, other: Path, step: int) -> None:
    expected = weights(other, step)
    for name, value in weights(run, step).items():
        assert torch.equal(value, expected[name]), name


def test_training_reports_pairs_and_exports_a_classifier(root: Path) -> None:
    run = root / "runs/p/rm"
    first, *rows = rows_of(run)
    assert set(first) >= {
        "val-core/rlctl/arithmetic/acc/mean@1",
        "val-aux/rlctl/arithmetic/margin",
        "val-aux/rlctl/arithmetic/ece",
    }
    for row in rows:
        assert row["reward_model/pair_loss"] == pytest.approx(row["reward_model/loss"], rel=1e-4)
        assert row["train/loss"] == pytest.approx(row["reward_model/loss"], rel=1e-4)
        assert 0 <= row["reward_model/accuracy"] <= 1
        for phase in ("rm_scores", "update_rm"):
            assert 0 < row[f"timing_s/{phase}"] < row["timing_s/step"]
    config = json.loads((run / "checkpoints/step_000003/huggingface/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["reward_std"] > 0
    assert "score.weight" in weights(run, 3)
    assert not (run / "checkpoints/step_000003/actor").exists()


def test_training_resumes_exactly(root: Path) -> None:
    again = api.resume(root / "runs/p/rm", from_step=1, fork="again", inline=True).path
    assert_equal_weights(again, root / "runs/p/rm", 3)


def test_policy_learns_from_the_model_and_shows_the_rule(root: Path) -> None:
    overrides = (
        "reward.reward_model.model.path=rm",
        "reward.reward_model.normalize=running",
        "trainer.total_training_steps=2",
    )
    recipe = compose("ppo_trainer", settings(root, "ppo", *policy(root), *overrides))
    run = api.train(recipe, inline=True).path
    first, *rows = rows_of(run)
    assert first["val-core/rlctl/arithmetic/acc/mean@1"] in (0.0, 1.0)
    assert "val-aux/rlctl/arithmetic/model_reward/mean@1" in first
    for row in rows:
        assert row["reward/rule/mean"] == 0.0
        assert row["reward/reward_model/mean"] != row["critic/score/mean"]
        assert row["timing_s/rm_scores"] > 0
        assert row["timing_s/reward"] > 0
    assert rows[0]["critic/score/mean"] == pytest.approx(0, abs=1e-5)  # normalized
    state = json.loads((run / "checkpoints/step_000001/state.json").read_text())
    assert state["reward"]["count"] == 4
    half = api.resume(run, from_step=1, fork="half", inline=True).path
    assert rows_of(half)[-1]["critic/score/mean"] == rows[-1]["critic/score/mean"]
    assert_equal_weights(half, run, 2)


def scores_of_transformers(folder: Path, chats: list[list[dict[str, str]]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        render = partial(tokenizer.apply_chat_template, return_tensors="pt", return_dict=True)
        return [model(**render(chat)).logits.item() for chat in chats]


def test_an_exported_model_gives_the_scores_of_the_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_TRUSTED", str(tmp_path))
    run = RunStore(root / "runs").find("p/rm")
    assert export(run, None, tmp_path / "rm") == 3
    assert not list((tmp_path / "rm").glob("*.bin"))
    assert "pipeline_tag: text-classification" in (tmp_path / "rm/README.md").read_text()
    chats = [
        [*row.prompt, {"role": "assistant", "content": row.extra_info["chosen"]}]
        for row in read_rows(root / "val.parquet")
    ]
    scores = scores_of_transformers(tmp_path / "rm", chats)
    tested = reward_test(root, "--model", str(tmp_path / "rm"))
    assert [each["chosen"] for each in tested["pairs"]] == pytest.approx(scores, abs=1e-5)
    again = reward_test(root, "--model", "rm", f"trainer.run_dir={root}/runs")
    assert again == tested

    checkpoint = tmp_path / "p/rm/checkpoints/step_000003"
    shutil.copytree(run.path, tmp_path / "p/rm")
    shutil.rmtree(checkpoint / "huggingface")
    rebuild(tmp_path / "p/rm", checkpoint, tmp_path / "rebuilt")
    assert scores_of_transformers(tmp_path / "rebuilt", chats) == scores
    names = ("reward_mean", "reward_std")
    configs = [
        json.loads((tmp_path / each / "config.json").read_text()) for each in ("rm", "rebuilt")
    ]
    assert [configs[0][name] for name in names] == [configs[1][name] for name in names]


def test_a_run_is_evaluated_on_its_pairs(root: Path) -> None:
    run = root / "runs/p/rm"
    (last,) = (row for row in rows_of(run) if row["step"] == 3)
    found = api.evaluate("p/rm", root=root / "runs").metrics
    assert found == {name: pytest.approx(last[name], abs=1e-6) for name in found}
    with pytest.raises(UsageError, match="generates no responses"):
        api.generate("p/rm", ["hello"], root=root / "runs")
    folder = root / "runs/p/rm/checkpoints/step_000003/huggingface"
    with pytest.raises(UsageError, match="generates no responses"):
        api.generate(folder, ["hello"])
    with pytest.raises(UsageError, match="generates no responses"):
        api.evaluate(folder)


def reward_test(root: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(root, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def invoke(root: Path, *arguments: str) -> Result:
    words = ["reward", "test", "--data", str(root / "val.parquet"), *arguments]
    return CliRunner().invoke(app, words)


def test_a_model_scores_pairs_and_responses_alone(root: Path, tmp_path: Path) -> None:
    model = ("--model", str(root / "runs/p/rm"))
    pairs = reward_test(root, *model)
    (last,) = (row for row in rows_of(root / "runs/p/rm") if row["step"] == 3)
    assert pairs["accuracy"] == last["val-core/rlctl/arithmetic/acc/mean@1"]
    assert pairs["margin"] == pytest.approx(last["val-aux/rlctl/arithmetic/margin"], abs=1e-5)
    responses = tmp_path / "responses.jsonl"
    texts = [each[name] for each in pairs["pairs"] for name in CHOSEN_AND_REJECTED]
    responses.write_text("\n".join(json.dumps(text) for text in texts))
    scored = reward_test(root, "--responses", str(responses), *model)
    assert [each["score"] for each in scored["answers"]] == [
        each[name] for each in pairs["pairs"] for name in ("chosen", "rejected")
    ]
    short = reward_test(root, *model, "reward.reward_model.max_length=8")
    assert short["pairs"] != pairs["pairs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the responses are missing"),
        (["--model", "/none"], "/none"),
        (["--model", "nosuch"], "no run is named 'nosuch'"),
        (["--model", "x", "--reward", "gsm8k"], "cannot be combined"),
        (["--model", "MODEL", "data.chosen_key=extra_info.best"], "no field 'extra_info.best'"),
    ],
)
def test_wrong_calls_of_reward_test(root: Path, arguments: list[str], message: str) -> None:
    run = str(root / "runs/p/rm")
    result = invoke(root, *(run if each == "MODEL" else each for each in arguments))
    assert isinstance(result.exception, RlctlError)
    assert message in str(result.exception)


def problems(root: Path, recipe: str, *overrides: str) -> str:
    with pytest.raises(RlctlError) as caught:
        make_plan(compose(recipe, settings(root, "x", *overrides)), inline=True)
    return str(caught.value)


def test_wrong_models_and_pairs_are_reported_before_the_start(root: Path) -> None:
    generative = problems(root, "ppo_trainer", *policy(root))
    assert "is a Qwen2ForCausalLM, which writes text and has no head for a score" in generative
    assert f"reward.judge.model.path={root}/model" in generative
    missing = "reward.reward_model.model.path=/none"
    assert "/none" in problems(root, "ppo_trainer", *policy(root), missing)
    model = f"reward.reward_model.model.path={root}/model"
    assert "has no field 'extra_info.better' (data.chosen_key)" in problems(
        root, "rm_trainer", model, "data.chosen_key=extra_info.better"
    )


def test_model_scale_needs_a_model_that_has_one(root: Path) -> None:
    folder = root / "runs/p/rm/checkpoints/step_000002/huggingface"
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, root / "plain")
    for name in ("reward_mean", "reward_std"):
        config.pop(name)
    (root / "plain/config.json").write_text(json.dumps(config))
    own = [f"reward.reward_model.model.path={root}/plain", "reward.reward_model.normalize=model"]
    found = problems(root, "ppo_trainer", *policy(root), *own)
    assert "has no reward_mean and reward_std" in found

"""Command lines that failed, and the corrected ones that rlctl prints for them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.cli.usage import correct, corrected
from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.rows import write_rows
from rlctl.errors import ConfigError, Problem
from rlctl.recipes.compose import compose
from tests.recorded import called


def fixed(*overrides: str) -> list[str]:
    """Return the overrides of the corrected command line of `rlctl train ppo OVERRIDES`."""
    with pytest.raises(ConfigError) as caught:
        compose("ppo", overrides)
    line = corrected(["train", "ppo", *overrides], caught.value.problems)
    assert line is not None, caught.value
    rlctl, train, verb, *words = shlex.split(line)
    assert (rlctl, train, verb) == ("rlctl", "train", "ppo")
    return words


@pytest.mark.parametrize(
    ("given", "works"),
    [
        ("trainer.total_epoch=3", "trainer.total_epochs=3"),
        ("+trainer.total_epoch=3", "trainer.total_epochs=3"),
        ("lr=1e-6", "actor_rollout_ref.actor.optim.lr=1e-6"),
        ("max_steps=7", "trainer.total_training_steps=7"),
        ("optim=adamw", "optim@actor_rollout_ref.actor.optim=adamw"),
        ("optim@critic.optim=adam", "optim@critic.optim=adamw"),
        ("data.train_files=a b.parquet,c", "data.train_files=[a b.parquet,c]"),
        ("data.train_files=[a,b", "data.train_files=[a,b]"),
        ("trainer.project_name=it's", 'trainer.project_name="it\'s"'),
        ("data.train_batch_size=1e1", "data.train_batch_size=10"),
        ("trainer.total_epochs=0", "trainer.total_epochs=1"),
        ("algorithm.gamma=1.5", "algorithm.gamma=1"),
        ("data.shuffle=yes", "data.shuffle=true"),
        ("trainer.device=cud", "trainer.device=cuda"),
        ("algorithm.adv_estimator=grppo", "algorithm.adv_estimator=grpo"),
        ("trainer.logger=[consol,jsonl]", "trainer.logger=[console,jsonl]"),
    ],
)
def test_the_corrected_line_composes(given: str, works: str) -> None:
    words = fixed("trainer.seed=3", given)
    assert words == ["trainer.seed=3", works]
    compose("ppo", words)


def test_all_mistakes_are_corrected_at_once() -> None:
    words = fixed("trainer.sed=1", "data.shuffle=off", "trainer.device=gpuu,", "critic.lr=2")
    assert words[:2] == ["trainer.seed=1", "data.shuffle=false"]
    assert words[3] == "critic.optim.lr=2"


def problem(given: str, instead: str) -> Problem:
    return Problem("wrong", fix=(given, instead))


def test_corrections_are_checked_and_corrected_again() -> None:
    """A correction may bring a problem of its own; one without a fix remains."""
    first, missing = problem("data.train_batch_size", "data.train_batch_size=40"), Problem("gone")

    def check(words: Sequence[str]) -> list[Problem]:
        mini = problem("mini", "mini=40")
        return [missing] if "mini=40" in words else [mini, missing]

    line, remaining = correct(["train", "ppo"], [first, missing], check)
    assert (line, remaining) == ("rlctl train ppo data.train_batch_size=40 mini=40", [missing])
    assert correct(["train", "ppo"], [first], lambda _: [])[1] == []
    assert correct(["train", "ppo"], [first, missing], None)[1] == [missing]
    assert correct(["train", "ppo"], [missing], check) == (None, [missing])


def test_a_batch_that_the_data_cannot_fill_brings_its_mini_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("40.parquet", generate(40, seed=1, level=1, careless=0.0, split="train"))
    batch = ["data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    batch = ["--recipe", "ppo", *batch, "trainer.n_gpus_per_node=1"]
    batch += ["data.max_response_length=100000"]
    words = ["train", "ppo", "--dry-run", "data.train_files=40.parquet", *batch]
    assert main([*words, "critic.ppo_mini_batch_size=256"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("corrected: rlctl train ppo ")
    assert main(shlex.split(last)[2:]) == 0
    own = "def score(data_source, solution_str, ground_truth):\n    pass\n"
    Path("mine.py").write_text(own, encoding="utf-8")
    reward = ["reward.custom_reward_function.path=mine.py"]
    assert main([*words, "critic.ppo_mini_batch_size=256", *reward]) == 3
    *_, remains, last = capsys.readouterr().err.splitlines()
    assert remains.startswith("remains: the reward file ")
    assert last.startswith("corrected in part: rlctl train ppo ")


def test_secrets_are_not_printed() -> None:
    secret = "hf_" + "a" * 30
    words = ["train", "ppo", f"x.api_key={secret}", "trainer.sed=1"]
    line = corrected(words, [problem("trainer.sed=1", "trainer.seed=1")]) or ""
    assert "trainer.seed=1" in line
    assert secret not in line
    renamed = corrected(words, [problem(f"x.api_key={secret}", f"y.api_key={secret}")]) or ""
    assert "y.api_key='<secret>'" in renamed or "'y.api_key=<secret>'" in renamed
    assert secret not in renamed


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("dapo", "ppo --recipe dapo"),
        ("tools", "grpo --recipe tools"),
        ("gsm8k_gropo", "grpo --recipe gsm8k_grpo"),
        ("dop", "dpo"),
    ],
)
def test_a_recipe_in_place_of_an_algorithm(given: str, right: str, here: Path) -> None:
    assert called("train", given).stderr.endswith(f": rlctl train {right}\n")

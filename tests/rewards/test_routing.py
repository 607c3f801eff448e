"""Tests of scorers by data source, the math scorer, and hashes of reward code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, MissingExtraError
from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Reward
from rlctl.runtime.rewards import geo3k
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.loading import load_reward
from rlctl.runtime.rewards.math_answers import score
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.specs import code_hashes, reward_specs

BASE = ("data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m")


def reward(*overrides: str) -> Reward:
    return compose("ppo_trainer", [*BASE, *overrides]).config.reward


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("rlctl/arithmetic", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "math"),
        ("aime_2024", "math"),
        ("numina_olympiads", "math"),
        ("hiyouga/geometry3k", "geo3k"),
    ],
)
def test_each_data_source_has_its_scorer(source: str, scorer: str) -> None:
    [spec] = reward_specs(reward(), [source])
    assert (spec.function, spec.sources) == (scorer, frozenset([source]))


def test_unknown_data_source_is_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match="no scorer for the data source 'my/own'") as caught:
        reward_specs(reward(), ["openai/gsm8k", "my/own"])
    [problem] = caught.value.problems
    assert "openai/gsm8k" in problem.message
    assert "reward.custom_reward_function.path=" in str(problem.hint)
    assert "'reward.functions=[gsm8k]'" in str(problem.hint)
    for forced in ("reward.functions=[gsm8k]", "reward.custom_reward_function.path=f.py"):
        assert len(reward_specs(reward(forced), ["my/own"])) == 1


def test_each_row_of_mixed_data_is_scored_by_its_own_scorer() -> None:
    rows = [
        PromptRow(source, [], "1/2" if "MATH" in source else "18")
        for source in ("openai/gsm8k", "lighteval/MATH") * 2
    ]
    responses = ["#### 18", r"so $\boxed{0.5}$", r"\boxed{19}", "#### 18"]
    sources = [row.data_source for row in rows]
    with RewardPool.from_config(reward("reward.timeout_s=300"), sources, 1) as pool:
        report = pool.score(rows, responses)
        assert report.first_error is None
        assert report.scores == [1.0, 1.0, 0.0, 0.0]
        assert [each.pred for each in report.results] == ["18", "1/2", None, "18"]
        with pytest.raises(ConfigError, match="my/own"):
            pool.score([PromptRow("my/own", [], "1")], ["1"])


@pytest.mark.parametrize(
    ("response", "truth", "wanted"),
    [
        (r"The answer is $\boxed{\frac{1}{2}}$.", "0.5", 1.0),
        (r"\boxed{12}, no: \boxed{13}", "13", 1.0),
        (r"\boxed{12}, no: \boxed{13}", "12", 0.0),
        ("Answer: 204", "204", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\text{odd}}", r"\text{even}", 0.0),
        ("no idea", "3", 0.0),
        (r"\boxed{", "18", 0.0),
    ],
)
def test_math_answers(response: str, truth: str, wanted: float) -> None:
    assert score("lighteval/MATH", response, truth)["score"] == wanted


THOUGHT = "<think>half of it</think>"


@pytest.mark.parametrize(
    ("response", "acc", "has_format"),
    [
        (rf"{THOUGHT} So \boxed{{\frac{{1}}{{2}}}}.", 1.0, 1.0),
        (r"So \boxed{0.5}.", 1.0, 0.0),
        (rf" {THOUGHT} \boxed{{0.5}}", 1.0, 0.0),
        (rf"{THOUGHT} \boxed{{2}}", 0.0, 1.0),
        (r"<think>\boxed{0.5}</think> 0.5", 1.0, 0.0),
        (f"{THOUGHT} 0.5", 0.0, 0.0),
        (rf"{THOUGHT} \boxed{{", 0.0, 0.0),
    ],
)
def test_geo3k_adds_a_tenth_for_the_format(response: str, acc: float, has_format: float) -> None:
    found = geo3k.score("hiyouga/geometry3k", response, r"\frac { 1 } { 2 }")
    assert (found["acc"], found["format"]) == (acc, has_format)
    assert found["score"] == pytest.approx(0.9 * acc + 0.1 * has_format)


def test_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError) as caught:
        load_reward(RewardSpec("math", 1.0))
    assert caught.value.problems[0].hint == "pip install 'rlctl[math]'"


def test_reward_code_is_hashed_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hashed").mkdir()
    for name in ("mine.py", "hashed/__init__.py", "hashed/score.py"):
        (tmp_path / name).write_text("1 / 0\n")
    own = reward(f"reward.custom_reward_function.path={tmp_path}/mine.py")
    module = reward("reward.functions=[gsm8k,'hashed.score:f']")
    first, second = code_hashes(own), code_hashes(module)
    assert (list(first), list(second)) == ([f"{tmp_path}/mine.py"], ["hashed.score"])
    (tmp_path / "mine.py").write_text("2 / 0\n")
    (tmp_path / "hashed/score.py").write_text("2 / 0\n")
    assert code_hashes(own) != first
    assert code_hashes(module) != second
    assert code_hashes(reward()) == {}

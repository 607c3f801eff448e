"""Tasks of reasoning-gym: rows by `rlctl prep`, and scores of its own functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.data_prep.rows import read_rows
from rlctl.errors import UsageError
from rlctl.runtime.rewards.reasoning_gym_score import score
from tests.abroad.training import SETTINGS
from tests.e2e.command import metrics, rlctl

TASKS = ("leg_counting", "basic_arithmetic", "word_sorting", "graph_color", "sudoku", "cryptarithm")


@pytest.mark.parametrize("task", TASKS)
def test_own_answers_score_as_in_the_package(task: str, tmp_path: Path) -> None:
    import reasoning_gym

    rlctl(
        *("prep", "reasoning_gym", task, "--train", "4", "--system", "simple", "--out", "data"),
        cwd=tmp_path,
    )
    rate = reasoning_gym.get_score_answer_fn(task)
    rows = read_rows(tmp_path / "data/train.parquet")
    assert len(rows) == 4
    for row, entry in zip(rows, reasoning_gym.create_dataset(task, size=4, seed=0), strict=True):
        assert row.prompt[-1]["content"] == entry["question"]
        for answer in (str(entry["answer"]), "7", ""):
            text = f"<think>so</think> <answer>{answer}</answer>"
            found = score(row.data_source, text, row.ground_truth, row.extra_info)
            expected = rate(answer or text, json.loads(row.extra_info["entry"]))
            assert found["score"] == expected
    assert entry["answer"] is None or rate(entry["answer"], entry) == 1.0


def test_training_is_scored_by_the_package(tmp_path: Path) -> None:
    given = ["--train", "8", "--val", "4", "--out", "data"]
    rlctl("prep", "reasoning_gym", "leg_counting", *given, cwd=tmp_path)
    rlctl(
        *("train", "grpo", "--inline", "--name", "one", "data.train_files=data/train.parquet"),
        *("actor_rollout_ref.model.path=quickstart", "data.max_prompt_length=600"),
        *("data.max_response_length=16", "trainer.project_name=quickstart"),
        *(setting for setting in SETTINGS if ".agent." not in setting),
        cwd=tmp_path,
    )
    assert len(metrics(tmp_path / "runs/quickstart/one")) == 2


def test_a_task_whose_problems_do_not_survive_a_file_is_refused(tmp_path: Path) -> None:
    from rlctl.data_prep.reasoning_gym_rows import ReasoningGymParams, reasoning_gym

    with pytest.raises(UsageError, match="the scorer of rearc"):
        reasoning_gym(ReasoningGymParams(task="rearc"))

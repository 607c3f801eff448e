"""Data files from the stored responses of a run, which other commands read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.rows import read_rows
from rlctl.tracking.jsonl import RESPONSES, generations_file, read_generations
from tests.e2e.command import rlctl
from tests.e2e.conftest import small, write_shelf
from tests.settings import given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a command that has run two steps, with all their responses."""
    folder = tmp_path_factory.mktemp("work")
    reward = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    reward += "    return {'score': len(solution_str) % 4 / 2, 'even': len(solution_str) % 2}\n"
    (folder / "score.py").write_text(reward)
    settings = [*small(write_shelf(folder / "shelf")), *given(n=4, reward="score.py", save=1)]
    more = ["trainer.rollout_data_dir=kept", "reward.num_processes=1"]
    rlctl("train", "grpo", "--inline", "--name", "a", *settings, *more, cwd=folder)
    return folder


def written(folder: Path, *words: str) -> list[dict[str, Any]]:
    rlctl("data", "from-runs", "a", *words, "--out", "out.parquet", cwd=folder)
    return pq.read_table(folder / "out.parquet").to_pylist()


def test_right_responses_become_rows_of_sft(folder: Path):
    rows = written(folder, "--where", "score == 1 and finish != 'x'", "--best", "2")
    run = folder / "runs" / "quickstart" / "a"
    by_prompt: dict[str, set[str]] = {}
    for step in (1, 2):
        for sample in read_generations(generations_file(run, step, RESPONSES)):
            if sample.score == 1:
                by_prompt.setdefault(sample.prompt, set()).add(sample.response)
    assert len(rows) == sum(min(2, len(responses)) for responses in by_prompt.values())
    originals = {json.dumps(row.prompt): row for row in read_rows(folder / "shelf/train.parquet")}
    for row in rows:
        original, info = originals[json.dumps(row["prompt"])], row["extra_info"]
        assert row["reward_model"]["ground_truth"] == original.ground_truth
        assert any(info["answer"] in responses for responses in by_prompt.values())
        assert (info["from_run"], info["score"]) == ("quickstart/a", 1.0)
        # The weights of step 1 wrote the responses of step 2.
        assert info["from_checkpoint"] == {1: None, 2: "step_000001"}[info["from_step"]]
    assert len({(str(row["prompt"]), row["extra_info"]["answer"]) for row in rows}) == len(rows)
    trained = ["--inline", *small(folder / "shelf"), *given(train="out.parquet", batch=4, steps=1)]
    rlctl("train", "sft", *trained, "data.val_files=null", cwd=folder)


def test_pairs_differ_by_the_margin(folder: Path):
    rows = written(folder, "--as", "pairs", "--margin", "0.6", "--best", "1")
    assert rows
    for row in rows:
        info = row["extra_info"]
        better, worse = (len(info[name]) % 4 / 2 for name in ("chosen", "rejected"))
        assert better - worse == info["margin"]
        assert info["margin"] >= 0.6
    assert len({str(row["prompt"]) for row in rows}) == len(rows)


def test_prompts_are_chosen_by_their_mean(folder: Path):
    rows = written(folder, "--as", "prompts", "--where", "mean > 0.5 and count >= 4")
    assert rows
    assert all(row["extra_info"]["mean_score"] > 0 for row in rows)
    assert len({str(row["prompt"]) for row in rows}) == len(rows)


def test_errors_and_counts(folder: Path):
    out = ["--out", "none.parquet"]
    failed = rlctl("data", "from-runs", "a", "--where", "evn == 1", *out, cwd=folder, code=2)
    assert "no response has a field or key 'evn'" in failed.stderr
    assert "did you mean" in failed.stderr
    failed = rlctl("data", "from-runs", "a", "--where", "score > 9", *out, cwd=folder, code=4)
    assert "no response is left (64 not matching)" in failed.stderr
    failed = rlctl("data", "from-runs", "a", "--margin", "1", *out, cwd=folder, code=2)
    assert "--as pairs" in failed.stderr
    assert not (folder / "none.parquet").exists()
    counted = rlctl("data", "from-runs", "a", "--where", "even == 1", *out, "--json", cwd=folder)
    shown = json.loads(counted.stdout)
    assert shown["rows"] + sum(shown["left_out"].values()) == 64

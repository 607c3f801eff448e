"""Advice about the slowest phase, and responses that show a trade of reward components."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.runs.run_dir import RunDir
from rlctl.tracking.jsonl import TRAINED, generations_file, write_samples
from rlctl.tracking.tracker import Sample
from tests.e2e.command import rlctl
from tests.recorded import record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunDir.create(tmp_path, "p", "r", "ppo").path


def advice(run: Path) -> dict[str, Any]:
    words = ["show", "r", "--root", run.parents[1], "--advice", "--json"]
    return json.loads(rlctl(*words, cwd=run).stdout)


def test_the_slowest_phase_and_what_a_change_saves(run: Path) -> None:
    """A step takes 10 s, with a pass of 4 s and a reward of 2 s, and its validation 2.5 s."""
    timing = {"step": 10.0, "gen": 3.0, "old_log_prob": 4.0, "reward": 2.0, "update_actor": 1.0}
    row = {f"timing_s/{name}": value for name, value in timing.items()}
    slow = dict.fromkeys(row, 100.0)  # of the first two steps, which warm up
    rows = {step: slow if step < 3 else row for step in range(1, 7)}
    rows[6] = row | {"timing_s/testing": 10.0}
    record(run, rows)
    found = advice(run)
    assert found["steps"] == [3, 6]
    assert found["slowest"] == "old_log_prob"
    assert found["shares"]["testing"] == pytest.approx(2.5 / 12.5)
    gains = {hint["change"].partition(",")[0]: hint["gain"] for hint in found["hints"]}
    assert gains["algorithm.rollout_correction.bypass_mode=true"] == pytest.approx(4 / 12.5)
    assert gains["reward.num_processes"] == pytest.approx(1 / 12.5)
    assert gains["trainer.test_freq"] == pytest.approx(1.25 / 12.5)
    assert next(iter(gains)).startswith("algorithm")  # the largest gain first
    text = rlctl("show", "r", "--root", run.parents[1], "--advice", cwd=run).stdout
    assert "old_log_prob holds the run back: 32% of its time" in text
    assert "at most 32%" in text


def test_a_run_without_steps_has_no_advice(run: Path) -> None:
    error = rlctl("show", "r", "--root", run.parents[1], "--advice", cwd=run, code=4).stderr
    assert "no step of this run has been timed" in error
    words = ["--advice", "--components"]
    error = rlctl("show", "r", "--root", run.parents[1], *words, cwd=run, code=2).stderr
    assert "exclude each other" in error


def test_ten_responses_that_trade_one_component_for_another(run: Path) -> None:
    """Responses with the longest text and the worst accuracy come first."""
    rows = {
        step: {"reward/length/mean": float(step), "reward/acc/mean": 1 - step / 10}
        for step in range(1, 8)
    }
    record(run, rows)
    (run / TRAINED).mkdir()
    for step in (6, 7):
        samples = [
            Sample("p", f"{step}/{i}", "t", 0.0, {"length": i, "acc": 1 - i / 6}, 3, "stop", "x")
            for i in range(6)
        ]
        write_samples(generations_file(run, step, TRAINED), samples)
    words = ["show", "r", "--root", run.parents[1], "--components"]
    found = json.loads(rlctl(*words, "--json", cwd=run).stdout)
    assert (found["rising"], found["falling"], len(found["samples"])) == ("length", "acc", 10)
    first = [each["sample"]["response"] for each in found["samples"]]
    assert set(first[:2]) == {"6/5", "7/5"}
    assert not {"6/0", "7/0"} & set(first)
    done = rlctl(*words, cwd=run)
    assert "length rises while acc falls: 10 of 12 stored responses" in done.stderr

"""Runs whose rewards fail: refused, named or ended, and saves by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.e2e.command import metrics, rlctl
from tests.e2e.killed_runs import events
from tests.settings import given

SCORE = """
def compute_score(solution_str, ground_truth, extra_info, **_):
    if extra_info["split"] == "train" and not ground_truth.startswith("right"):
        if solution_str != ground_truth:
            return complicated(ground_truth)
    return 1.0

def complicated(truth):
    raise LookupError("no entry for this truth")
"""
SLOW = """
import time

def compute_score(solution_str, ground_truth, extra_info, **_):
    if solution_str != ground_truth and extra_info["index"] % 2:
        time.sleep(60)
    return 1.0
"""


ONE_EACH = """
def compute_score(solution_str, ground_truth, extra_info, **_):
    if solution_str == ground_truth:  # as before the start
        return 1.0
    raise LookupError(f"a row of {extra_info['split']}")
"""


def failing(settings: list[str], folder: Path, code: str, *more: str) -> list[str]:
    (folder / "score.py").write_text(code)
    return [*settings, *given(reward="score.py", reward_processes=1, steps=4, validate=-1), *more]


def test_a_run_without_rewards_ends_with_their_error(settings: list[str], tmp_path: Path) -> None:
    words = failing(settings, tmp_path, SCORE)
    done = rlctl("train", "grpo", "--inline", "--name", "bad", *words, cwd=tmp_path, code=1)
    error = "LookupError: no entry for this truth"
    place = f"({tmp_path}/score.py:9)"
    assert "the reward of every response failed in 3 steps in a row, the last being step 3" in (
        done.stderr
    )
    assert f"the first error: {error} {place}" in done.stderr
    run = tmp_path / "runs" / "quickstart" / "bad"
    alarms = [event for event in events(run, "alarm") if event["name"] == "failed_rewards"]
    assert [alarm["step"] for alarm in alarms] == [1]
    assert f"the first error: {error} {place}" in alarms[0]["message"]
    assert [event["first"] for event in events(run, "reward_error")] == [f"{error} {place}"]
    logs = rlctl("logs", "bad", cwd=tmp_path).stdout
    assert 0 < logs.count(error) <= 3
    assert "score.py" in logs
    assert "Traceback" in logs
    shown = rlctl("show", "bad", "--json", cwd=tmp_path).stdout
    assert json.loads(shown)["alarms"][0]["name"] == "failed_rewards"


def test_a_reward_that_takes_too_long_names_its_limit(settings: list[str], tmp_path: Path) -> None:
    words = failing(settings, tmp_path, SLOW, "reward.timeout_s=0.2", *given(steps=1, val=None))
    done = rlctl("train", "grpo", "--inline", "--name", "slow", *words, cwd=tmp_path)
    assert "reward.timeout_s=N allows more time" in done.stderr
    row = metrics(tmp_path / "runs" / "quickstart" / "slow")[-1]
    assert row["reward/num_timed_out"] == row["reward/num_failed"] > 0
    assert f"the reward of {int(row['reward/num_failed'])} responses failed" in done.stderr


def test_each_file_is_scored_before_the_start(
    settings: list[str], shelf: Path, tmp_path: Path
) -> None:
    """The rows of the second file fail, beside a good one of the same data source."""
    rows = parquet.read_table(shelf / "train.parquet").to_pylist()
    for row in rows:
        row["extra_info"]["bad"] = True
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = "def compute_score(extra_info, **_):\n    return 1 / (not extra_info.get('bad'))\n"
    words = failing(settings, tmp_path, code, f"data.train_files=[{shelf}/train.parquet,bad.jsonl]")
    done = rlctl("train", "grpo", "--inline", "--dry-run", *words, cwd=tmp_path, code=3)
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "at: data.train_files: bad.jsonl" in done.stderr


@pytest.mark.parametrize("every", ["1h", "0h0m1s"])
def test_checkpoints_by_the_clock(every: str, settings: list[str], tmp_path: Path) -> None:
    """A step takes longer than the shorter time, because its reward waits."""
    code = "import time\n\ndef compute_score(**_):\n    time.sleep(0.15)\n    return 1.0\n"
    words = failing(settings, tmp_path, code, f"trainer.save_every={every}", *given(steps=2))
    done = rlctl("train", "grpo", "--inline", "--name", "timed", *words, cwd=tmp_path)
    assert "no checkpoints are written" not in done.stderr
    found = sorted(path.name for path in tmp_path.glob("runs/quickstart/timed/checkpoints/step_*"))
    assert found[-1] == "step_000002"
    assert ("step_000001" in found) == (every == "0h0m1s")


def test_a_run_without_checkpoints_says_what_a_kill_loses(
    settings: list[str], tmp_path: Path
) -> None:
    done = rlctl("train", "grpo", "--inline", *settings, *given(steps=1), cwd=tmp_path)
    assert done.stderr.count("no checkpoints are written, so a kill or crash loses every step") == 1


@pytest.mark.parametrize("how", ["score", "drop"])
def test_dynamic_sampling_without_rewards_ends_with_their_error(
    how: str, settings: list[str], here: Path
) -> None:
    filters = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    more = ["algorithm.filter_groups.max_num_gen_batches=2", "data.val_files=null"]
    if how == "drop":  # without a filter
        filters, more = ["reward.failed=drop"], ["data.val_files=null"]
    words = failing(settings, here, SCORE, *filters, *more)
    done = rlctl("train", "grpo", "--inline", *words, cwd=here, code=1)
    assert f"the first error: LookupError: no entry for this truth ({here}/score.py:9)" in (
        done.stderr
    )
    assert ("reward of every response failed" in done.stderr) == (how == "score")


def test_the_alarm_quotes_the_errors_of_training(settings: list[str], tmp_path: Path) -> None:
    """The validation before has failed for another reason."""
    words = [*failing(settings, tmp_path, ONE_EACH), *given(steps=1, validate=1)]
    rlctl("train", "grpo", "--inline", "--name", "bad", *words, cwd=tmp_path, code=1, fork=True)
    found = events(tmp_path / "runs" / "quickstart" / "bad", "alarm")
    messages = [event["message"] for event in found if event["name"] == "failed_rewards"]
    assert "a row of train" in messages[0], messages

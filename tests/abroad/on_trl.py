"""Environments of TRL, next to TRL itself: the class of its documentation, and its own types."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from rlctl.plugins.user_code import load_named
from tests.abroad.training import AGENT, NUM_EPISODES, train
from tests.e2e.command import rlctl
from tests.plugins.agents.environments.episodes import play_here

# The shape of TRL's `environment_factory`: reset gets the row, public methods are tools.
ENVIRONMENT = '''
class IncrementEnv:
    def reset(self, *, start, **kwargs) -> str | None:
        self.counter = start
        return f"The counter is {start}. "

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The counter after the increment.
        """
        self.counter += step
        return self.counter
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("107" in solution_str)
"""
START = 100


def test_training_calls_the_methods(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    (tmp_path / "reward.py").write_text(REWARD)
    prompt = [{"role": "user", "content": "Count."}]
    rows = [{"prompt": prompt, "start": START, "goal": START + 7} for _ in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ["--prompt-key", "prompt", "--answer-key", "goal"]
    rlctl("prep", "jsonl", "rows.jsonl", *keys, "--out", "data", cwd=tmp_path)
    found = train(
        tmp_path,
        "data.train_files=data/train.parquet",
        f"{AGENT}.environment=envs.py:IncrementEnv",
        "reward.functions=[reward.py:compute_score]",
        "data.max_response_length=200",
        calls=[("increment", {"step": 7}), ("increment", {"step": 9})],
    )
    assert found.total("tool/increment/calls") == 2 * NUM_EPISODES
    assert list(found.replies()) == ["107", "116"] * NUM_EPISODES
    assert {row["critic/score/mean"] for row in found.rows} == {1.0}


def test_tools_are_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL takes methods as `inspect` finds them, and their schemas from Transformers."""
    from transformers.utils import get_json_schema
    from trl import GRPOTrainer

    assert "environment_factory" in inspect.signature(GRPOTrainer).parameters
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    found = load_named("environments", "envs.py:IncrementEnv", "environment")
    trls = [
        method
        for name, method in inspect.getmembers(found, predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]
    [ours] = play_here("envs.py:IncrementEnv", {}, [], {"extra_info": {"start": 1}}).tools
    [schema] = [get_json_schema(method) for method in trls]
    schema["function"].pop("return")
    assert ours == schema

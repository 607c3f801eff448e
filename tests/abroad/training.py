"""Two steps of training with an environment or an agent program, and what its episodes recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.quickstart import real_path
from rlctl.runtime.serving.chat import ToolCall, ToolSchema, Turn
from tests.e2e.command import metrics, rlctl

AGENT = "actor_rollout_ref.rollout.agent"
NUM_EPISODES = 16  # of both steps: 4 prompts, 2 responses each
SETTINGS = [
    *("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1"),
    *("trainer.val_before_train=false", "data.val_files=null", "trainer.num_threads=1"),
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.rollout.n=2", "trainer.rollout_data_dir=rollouts"),
    f"{AGENT}.num_workers=1",
    f"{AGENT}.max_failed_share=0",
]
CALL = Path("call.json")


class Caller:
    """Parser that reads the first turns of an episode as the calls in call.json.

    The quickstart's model calls a calculator only: this makes it call any tool.
    """

    def __init__(self) -> None:
        self._calls = json.loads(CALL.read_text(encoding="utf-8"))

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:
        """Return the call of this turn; the text itself after the last one."""
        if offset >= len(self._calls):
            return Turn(text)
        name, arguments = self._calls[offset]
        known = [tool["function"]["name"] for tool in tools]
        assert name in known, f"{name} is not in {known}"
        return Turn("", (ToolCall(f"call{offset:05d}", name, arguments),))


@dataclass(frozen=True)
class Trained:
    """Rows of metrics, and the episodes of all steps."""

    rows: list[dict[str, Any]]
    episodes: list[dict[str, Any]]

    def total(self, metric: str) -> float:
        return sum(row[metric] for row in self.rows)

    def replies(self, role: str = "tool") -> Iterator[str]:
        """Yield the text of each message of `role`, in the order of the transcripts."""
        for episode in self.episodes:
            yield from (each["text"] for each in episode["messages"] if each["role"] == role)


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file


def wide_model(folder: Path) -> Path:
    """Copy the quickstart's model for agents, with room for the long prompts of frameworks."""
    copy = folder / "policy"
    shutil.copytree(real_path("quickstart-agent"), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return copy


def train(folder: Path, *overrides: str, calls: Sequence[tuple[str, Any]] = ()) -> Trained:
    """Train two steps in `folder`; the policy begins each episode with `calls`, if there are any.

    Asserts that no token was tokenized again and no episode failed.
    """
    (folder / CALL).write_text(json.dumps(calls))
    parser = [f"actor_rollout_ref.rollout.multi_turn.format={__name__}:Caller"] if calls else []
    begin = ["train", "grpo", "--recipe", "tools", "--inline", "--name", "one"]
    rlctl(*begin, *SETTINGS, *parser, *overrides, cwd=folder)
    rows = metrics(folder / "runs/quickstart/one")
    files = sorted((folder / "rollouts").rglob("step_*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    # Rows of an episode have the same record, which its time tells from those of others.
    episodes = {sample["episode"]["seconds"]: sample["episode"] for sample in samples}
    found = Trained(rows, list(episodes.values()))
    assert len(rows) == 2
    assert found.total("agent/retokenized_tokens") == 0
    return found

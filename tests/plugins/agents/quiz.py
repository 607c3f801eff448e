"""Environment that asks several problems in one episode, and rows for it.

The quickstart's model answers each with `#### N`. A right answer is a reward for its turn.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn


def write_quiz(
    folder: Path, num_rows: int, num_problems: int = 4, programs: Sequence[str] = ()
) -> Path:
    """Write rows of `num_problems` problems each; the program of a row is for `programs.by_row`."""
    problems, _ = train_and_validation(num_rows * num_problems, 1, seed=0, level=1, careless=0.0)
    rows = []
    for i in range(num_rows):
        first, *further = problems[i * num_problems : (i + 1) * num_problems]
        extra_info: dict[str, Any] = {"program": programs[i]} if programs else {}
        extra_info["further"] = [[row.prompt[-1]["content"], row.ground_truth] for row in further]
        rows.append(
            PromptRow("tests/quiz", first.prompt, first.ground_truth, extra_info=extra_info)
        )
    write_rows(folder / "quiz.parquet", rows)
    return folder / "quiz.parquet"


class Quiz:
    """Asks the row's problems one after the other.

    `extra_info.fail_at` names the turn at which it raises.
    """

    tools: tuple[ToolSchema, ...] = ()

    async def reset(self, row: Row) -> None:
        extra_info = row["extra_info"]
        self._truths = [row["ground_truth"], *(truth for _, truth in extra_info["further"])]
        self._questions = [question for question, _ in extra_info["further"]]
        self._fail_at = extra_info.get("fail_at")
        self._number = 0

    async def step(self, turn: Turn) -> Step:
        if self._number == self._fail_at:
            raise RuntimeError("the quiz is broken")
        reward = float(turn.text.rpartition("#### ")[2].strip() == str(self._truths[self._number]))
        done = self._number == len(self._questions)
        messages: list[Message] = []
        if not done:
            messages = [{"role": "user", "content": self._questions[self._number]}]
        self._number += 1
        return Step(messages, reward / len(self._truths), done)

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass


class Stuck(Quiz):
    """Blocks its process."""

    async def step(self, turn: Turn) -> Step:
        time.sleep(3600)
        return await super().step(turn)


class Killed(Quiz):
    """Quiz whose process is killed in a second turn, as often as the file `kills` has bytes."""

    async def step(self, turn: Turn) -> Step:
        kills = Path("kills")
        if self._number == 1 and kills.stat().st_size:
            os.truncate(kills, kills.stat().st_size - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(turn)

"""Environment and tool whose replies have pictures of shapes."""

from __future__ import annotations

from typing import Any

from rlctl.data_prep.shapes import ShapesParams, shapes
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.runtime.serving.chat import ToolSchema, Turn


class Pictures:
    """Asks for the shape of the row's picture, then for that of another one."""

    tools: tuple[ToolSchema, ...] = ()

    async def reset(self, row: Row) -> None:
        assert row["images"], "an environment gets the images of its row"
        self._left = 1
        self._truth = row["ground_truth"]

    async def step(self, turn: Turn) -> Step:
        reward = float(turn.text.strip() == self._truth) / 2
        if not self._left:
            return Step(reward=reward, done=True)
        self._left -= 1
        (row,) = shapes(ShapesParams(train=1, val=1, seed=len(self._truth)))["train"]
        self._truth = row.ground_truth
        content: list[dict[str, Any]] = [
            {"type": "image", "image": row.images[0]},
            {"type": "text", "text": "What is it?"},
        ]
        return Step([{"role": "user", "content": content}], reward)

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass

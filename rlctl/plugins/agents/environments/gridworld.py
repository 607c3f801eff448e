"""Grid world in text: the policy walks to a goal, one word a turn.

The grid of an episode follows from `extra_info.seed` of its row, or `extra_info.index`: equal rows
have equal grids. Observations are as short as `at 0 3, goal 2 1` and `wall`.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence

from pydantic import Field

from rlctl import plugins
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
_WORD = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)


class GridParams(plugins.Params):
    """Settings of the grid world. Rows may replace `size` and `walls` in `extra_info`."""

    size: int = Field(4, ge=2, le=32, description="width and height of the grid")
    walls: int = Field(0, ge=0, description="cells that cannot be entered; never all ways")
    min_distance: int = Field(4, ge=1, description="least number of moves to the goal")
    max_turns: int = Field(12, ge=1, description="turns after which the episode ends")
    step_reward: float = Field(
        0.0, description="reward of a turn that leads closer to the goal; minus it for one away"
    )


class GridWorld:
    """Grid with a goal. The score is 1 if the policy reaches it, else 0."""

    Params = GridParams
    tools: Sequence[ToolSchema] = ()  # moves are words

    def __init__(self, params: GridParams) -> None:
        self._params = params
        self._size = params.size
        self._at = self._goal = (0, 0)
        self._distances: dict[Cell, int] = {}
        self._turns = 0

    async def reset(self, row: Row) -> list[Message] | str:
        """Return the first observation, which is added to the row's prompt if it has one."""
        extra = row.get("extra_info") or {}
        seed = extra.get("seed")
        if seed is None:
            seed = extra.get("index", 0)
        walls = extra.get("walls")
        if walls is None:
            walls = self._params.walls
        self._size = int(extra.get("size") or self._params.size)
        self._build(random.Random(f"grid {seed}"), walls)
        if row.get("prompt"):
            return self._observed()
        return [{"role": "user", "content": self._observed()}]

    async def step(self, turn: Turn) -> Step:
        """Move by the first of the words up, down, left and right in `turn`."""
        self._turns += 1
        before = self._distances[self._at]
        found = _WORD.search(turn.text)
        if found is None:
            observed = ", ".join(MOVES) + "?"
        else:
            dx, dy = MOVES[found[1].lower()]
            to = (self._at[0] + dx, self._at[1] + dy)
            observed = "wall"
            if to in self._distances:
                self._at = to
                observed = self._observed()
        reward = None
        if self._params.step_reward:
            reward = self._params.step_reward * (before - self._distances[self._at])
        if self._at == self._goal or self._turns >= self._params.max_turns:
            return Step([], reward=reward, done=True)
        return Step([{"role": "user", "content": observed}], reward=reward)

    async def score(self) -> dict[str, float]:
        """Return the score, and the number of turns as a component."""
        return {"score": float(self._at == self._goal), "turns": float(self._turns)}

    async def close(self) -> None:
        """Do nothing: the grid holds nothing."""

    def _build(self, rng: random.Random, walls: int) -> None:
        """Choose walls, goal and start. Raises ValueError if no start is far enough."""
        cells = [(x, y) for x in range(self._size) for y in range(self._size)]
        for _ in range(100):
            blocked = set(rng.sample(cells, min(walls, len(cells) - 2)))
            free = [cell for cell in cells if cell not in blocked]
            goal = rng.choice(free)
            distances = _distances(goal, set(free))
            far = [cell for cell in free if distances.get(cell, 0) >= self._params.min_distance]
            if far:
                self._goal = goal
                self._distances = distances
                self._at = rng.choice(far)
                return
        raise ValueError(
            f"no grid of size {self._size} with {walls} walls has a start that is "
            f"{self._params.min_distance} moves from the goal"
        )

    def _observed(self) -> str:
        return f"at {self._at[0]} {self._at[1]}, goal {self._goal[0]} {self._goal[1]}"


def _distances(goal: Cell, free: set[Cell]) -> dict[Cell, int]:
    """Return the number of moves to `goal` from each cell that it can be reached from."""
    found = {goal: 0}
    queue = deque([goal])
    while queue:
        x, y = queue.popleft()
        for dx, dy in MOVES.values():
            cell = (x + dx, y + dy)
            if cell in free and cell not in found:
                found[cell] = found[x, y] + 1
                queue.append(cell)
    return found

"""Tests of the grid world: deterministic, solvable, and short observations."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from rlctl.runtime.agents.environments.gridworld import MOVES, GridParams, GridWorld
from rlctl.runtime.agents.environments.protocol import Step, Turn


def started(extra: dict[str, Any], prompt: Any = (), **params: Any) -> tuple[GridWorld, Any]:
    grid = GridWorld(GridParams(**params))
    return grid, asyncio.run(grid.reset({"prompt": list(prompt), "extra_info": extra}))


def step(grid: GridWorld, text: str) -> Step:
    return asyncio.run(grid.step(Turn(text)))


def way(grid: GridWorld) -> list[str]:
    """Return the words of a shortest way to the goal."""
    words, at, distances = [], grid._at, grid._distances
    while at != grid._goal:
        for word, (dx, dy) in MOVES.items():
            to = (at[0] + dx, at[1] + dy)
            if distances.get(to, 99) < distances[at]:
                words.append(word)
                at = to
                break
    return words


def test_equal_rows_have_equal_grids_and_need_four_turns() -> None:
    observed = [started({"seed": seed}, walls=3)[1][0]["content"] for seed in range(30)]
    assert observed == [started({"seed": seed}, walls=3)[1][0]["content"] for seed in range(30)]
    assert len(set(observed)) > 20
    assert all(re.fullmatch(r"at \d \d, goal \d \d", each) for each in observed)
    assert observed[7] == started({"index": 7, "seed": None}, walls=3)[1][0]["content"]
    for seed in range(30):
        grid, _ = started({"seed": seed}, walls=3)
        words = way(grid)
        assert 4 <= len(words) <= 12
        steps = [step(grid, f"I go {word}!") for word in words]
        assert [each.done for each in steps] == [False] * (len(words) - 1) + [True]
        assert asyncio.run(grid.score()) == {"score": 1.0, "turns": len(words)}


def test_walls_unknown_words_and_the_end() -> None:
    grid, observed = started({"seed": 0, "size": 3, "walls": 0}, prompt=[{"role": "user"}])
    assert isinstance(observed, str)  # added to the row's prompt
    texts = [step(grid, "left").messages[0]["content"] for _ in range(3)]
    assert texts[-1] == "wall"
    assert step(grid, "jump").messages[0]["content"] == "up, down, left, right?"
    while not (last := step(grid, "left")).done:
        pass
    assert last == Step([], done=True)
    assert asyncio.run(grid.score()) == {"score": 0.0, "turns": 12.0}


def test_rewards_of_steps_cancel_out() -> None:
    grid, _ = started({"seed": 3}, step_reward=0.5)
    there = way(grid)[0]
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}[there]
    assert [step(grid, word).reward for word in (there, back, "jump")] == [0.5, -0.5, 0.0]


def test_grid_without_a_far_start_is_refused() -> None:
    with pytest.raises(ValueError, match="no grid of size 2"):
        started({"seed": 0}, size=2, min_distance=5)

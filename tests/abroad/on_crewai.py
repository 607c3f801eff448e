"""CrewAI, whose pins need an environment of its own."""

from __future__ import annotations

from pathlib import Path

from tests.abroad.on_agents import WEATHER, play


def test_the_tool_runs_in_every_episode(tmp_path: Path) -> None:
    play("crewai", [WEATHER], tmp_path)

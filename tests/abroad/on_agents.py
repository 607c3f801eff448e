"""Agent frameworks as they are: a small agent with one tool each, trained for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.abroad.training import AGENT, NUM_EPISODES, Trained, train, wide_model, write_rows

PROGRAMS = Path(__file__).parent / "programs"
WEATHER = ("weather", {"city": "Ulm"})
ANSWER = ("final_answer", {"answer": "21 degrees"})
CALLS = {
    "openai_agents": [WEATHER],
    "openai_responses": [WEATHER],
    "lang_graph": [WEATHER],
    "smolagents": [WEATHER, ANSWER],
    "pydantic_ai": [WEATHER],
    "autogen": [WEATHER],
}
ROWS = [
    {
        "data_source": "agents",
        "prompt": [{"role": "user", "content": "What is the weather in Ulm?"}],
        "reward_model": {"style": "rule", "ground_truth": "21"},
    }
] * 4


def play(name: str, calls: list[tuple[str, dict[str, str]]], folder: Path) -> Trained:
    found = train(
        folder,
        *(f"{AGENT}.environment=null", f"~{AGENT}.params.tools"),
        f"{AGENT}.program={PROGRAMS / name}.py:run",
        f"data.train_files={write_rows(folder / 'rows.parquet', ROWS)}",
        f"actor_rollout_ref.model.path={wide_model(folder)}",
        *("data.max_prompt_length=6000", "data.max_response_length=2000"),
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        calls=calls,
    )
    assert len(found.episodes) == NUM_EPISODES
    results = [
        any(
            "21 degrees in Ulm" in each["text"]
            for each in episode["messages"]
            if not each["trained"]
        )
        for episode in found.episodes
    ]
    assert all(results), f"the tool ran in {sum(results)} of {NUM_EPISODES} episodes"
    assert min(row["agent/turns/min"] for row in found.rows) >= 2
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_tool_runs_in_every_episode(name: str, tmp_path: Path) -> None:
    play(name, CALLS[name], tmp_path)

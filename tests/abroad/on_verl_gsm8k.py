"""verl's own tool and interaction for GSM8K, which its releases up to 0.7 have."""

from __future__ import annotations

from pathlib import Path

from tests.abroad.on_verl import SCHEMA, TRUTH, play
from tests.abroad.training import NUM_EPISODES


def test_the_tool_of_gsm8k(tmp_path: Path) -> None:
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": TRUTH}}}
    entry = {
        "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
        "config": {"type": "native"},
        "tool_schema": SCHEMA,
    }
    found = play(tmp_path, "tools", entry, need_tools_kwargs=True, tools_kwargs=kwargs)
    result = f"Current parsed answer='{TRUTH}' reward=1.0"  # as verl writes it
    assert list(found.replies()) == [result] * NUM_EPISODES
    for episode in found.episodes:
        assert episode["components"]["calc_gsm8k_reward"] == 1.0


def test_the_interaction_of_gsm8k(tmp_path: Path) -> None:
    entry = {
        "name": "gsm8k",
        "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction",
        "config": {},
    }
    kwargs = {"name": "gsm8k", "query": "What is 60 plus 12?", "ground_truth": TRUTH}
    found = play(tmp_path, "interaction", entry, interaction_kwargs=kwargs)
    said = list(found.replies("user"))
    assert len(said) >= NUM_EPISODES
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert {*said} <= {wrong, "Your response is correct!"}
    assert len(found.episodes) == NUM_EPISODES

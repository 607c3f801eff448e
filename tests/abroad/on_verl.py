"""A tool with the base class of verl itself, configured by its YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.abroad.training import AGENT, NUM_EPISODES, Trained, train, wide_model, write_rows

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TRUTH = "72"
# As in verl's examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml.
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "A tool for calculating the reward of gsm8k.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The model's answer"}},
            "required": ["answer"],
        },
    },
}
OWN_TOOL = '''
from verl.tools.base_tool import BaseTool


class Counter(BaseTool):
    """Tool that records the methods which an episode has called."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.calls = {}

    async def create(self, instance_id=None, **kwargs):
        self.calls[instance_id] = ["create"]
        made = await super().create(instance_id, **kwargs)
        return made

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls[instance_id].append("execute")
        text = f"{parameters['answer']} after {len(self.calls[instance_id])} calls"
        try:
            from verl.tools.schemas import ToolResponse
        except ImportError:  # verl 0.5
            return text, 0.5, {}
        return ToolResponse(text=text), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        self.calls[instance_id].append("calc_reward")
        return 0.25 * len(self.calls[instance_id])

    async def release(self, instance_id, **kwargs):
        with open(self.config["log"], "a") as file:
            print(*self.calls.pop(instance_id), "release", file=file)
'''


def play(folder: Path, kind: str, entry: dict[str, Any], **extra_info: Any) -> Trained:
    """Train with the YAML file that has `entry` in its list `<kind>`."""
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump({kind: [entry]}))
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 60 plus 12?"}],
        "reward_model": {"style": "rule", "ground_truth": TRUTH},
        "extra_info": extra_info,
    }
    return train(
        folder,
        f"~{AGENT}.params.tools",
        f"{MULTI_TURN}.{'tool' if kind == 'tools' else 'interaction'}_config_path={file}",
        f"data.train_files={write_rows(folder / 'rows.parquet', [row] * 4)}",
        f"actor_rollout_ref.model.path={wide_model(folder)}",
        *("data.max_prompt_length=800", "data.max_response_length=600"),
        calls=[("calc_gsm8k_reward", {"answer": TRUTH})] if kind == "tools" else [],
    )


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_tool.py").write_text(OWN_TOOL)
    log = tmp_path / "calls.txt"
    entry = {
        "class_name": "own_tool.Counter",
        "config": {"type": "native", "log": str(log)},
        "tool_schema": SCHEMA,
    }
    found = play(tmp_path, "tools", entry, index=0)
    assert list(found.replies()) == [f"{TRUTH} after 2 calls"] * NUM_EPISODES
    checked, *played = log.read_text().splitlines()
    assert checked == "create release", "the check before the first step"
    assert played == ["create execute calc_reward release"] * NUM_EPISODES

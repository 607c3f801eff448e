"""Tests of verl's tools and interactions without verl: both generations, files unmodified."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.plugins.agents.environments.verl.tools import result_of
from rlctl.runtime.serving.chat import Turn
from tests.plugins.agents.environments.episodes import load_here, play, play_here, turn_of

# Imports and signatures as in verl v0.5 ...
OLD = """
import logging, os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

class OldTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> str:
        assert not set(kwargs) - {"create_kwargs"}, kwargs
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[str, float, dict]:
        answer = parameters.get("answer", "")
        if not isinstance(answer, str):
            answer = str(answer)
        self._instance_dict[instance_id]["response"] = "#### " + answer
        reward = await self.calc_reward(instance_id)
        return f"{answer=} {reward=} {kwargs.get('bonus')}", reward, {"tries": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(
            state["response"], state["ground_truth"], method="flexible", format_score=0.0, score=1.0
        )

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
        print("released, left:", len(self._instance_dict))
"""
# ... and as in 0.7 to 0.9.
NEW = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class NewTool(BaseTool):
    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        self.limit = kwargs.get("create_kwargs", {}).get("limit")
        return str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        fields = kwargs["agent_data"].extra_fields
        fields["calls"] = fields.get("calls", 0) + 1
        return ToolResponse(text=f"call {fields['calls']} of {self.limit}"), 0.0, {}
"""
YAML = """
tools:
  - class_name: old_tools.OldTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: submit
        description: Submit a result.
        parameters:
          type: object
          properties: {answer: {type: string, description: The number., enum: null}}
          required: [answer]
  - class_name: new_tools.NewTool
    config: {}
    tool_schema: {type: function, function: {name: count, description: Count., parameters: {}}}
"""
SHIPPED = """
tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}]
"""
USER = """
interaction:
  - {name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}
  - {class_name: users.PatientInteraction, config: {patience: 2}}
"""
USERS = """
from verl.interactions.base import BaseInteraction

class PatientInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.turns = {instance_id: 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.turns[instance_id] += 1
        roles = [message["role"] for message in messages]
        is_over = self.turns[instance_id] > self.config["patience"]
        return is_over, f"{kwargs['query']} {roles}", 0.5, {"a": 1}

    async def finalize_interaction(self, instance_id, **kwargs):
        print("finalized", instance_id in self.turns)
"""


@pytest.fixture
def folder(here: Path) -> Iterator[Path]:
    files = {"old_tools.py": OLD, "new_tools.py": NEW, "tools.yaml": YAML, "shipped.yaml": SHIPPED}
    for name, text in {**files, "users.yaml": USER, "users.py": USERS}.items():
        (here / name).write_text(text)
    yield here
    assert not [name for name in sys.modules if name.partition(".")[0] == "verl"]


SETTINGS = {"max_parallel_calls": 5, "max_tool_response_length": 1000}


def test_classes_of_both_generations(folder: Path) -> None:
    kwargs = {
        "submit": {
            "create_kwargs": {"ground_truth": "42", "limit": None},
            "execute_kwargs": {"bonus": 7},
            "calc_reward_kwargs": None,
        },
        "count": {"create_kwargs": {"limit": 3}},
        "other": None,
    }
    row = {"prompt": [], "extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs}}
    turns = [
        turn_of("submit", answer="41"),
        turn_of("submit", answer=42),
        turn_of("count"),
        turn_of("count"),
        turn_of("submit"),
        Turn("42"),
    ]
    played = play("tools", {**SETTINGS, "tool_config_path": "tools.yaml"}, turns, row)
    assert played.texts == [
        "answer='41' reward=0.0 7",
        "answer='42' reward=1.0 7",
        "call 1 of 3",
        "call 2 of 3",
        "error: wrong arguments: 'answer' is a required property",
    ]
    assert played.steps[1].info == {
        "tool_rewards": [1.0],
        "tool_metrics": {"submit": {"tries": 1}},
    }
    assert played.steps[-1].done
    assert played.score == {"submit": 1.0}  # of `calc_reward`; the run's reward functions score
    assert "released, left: 0" in Path("environment-0.log").read_text(encoding="utf-8")


def test_gsm8k_tool_of_verl_by_its_name(folder: Path) -> None:
    row = {
        "extra_info": {
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1234"}}}
        }
    }
    turns = [turn_of("calc_gsm8k_reward", answer=each) for each in ("7", "#### 1234", 1234)]
    played = play_here("tools", {**SETTINGS, "tool_config_path": "shipped.yaml"}, turns, row)
    assert "reward 0.0" in played.texts[0]
    assert "reward 1.0" in played.texts[1]
    rewards = [step.info.get("tool_rewards") for step in played.steps]
    assert rewards == [[-0.05], [0.0], [-0.05]]
    assert played.score == {"calc_gsm8k_reward": 1.0}


def test_interactions(folder: Path) -> None:
    params = {
        **SETTINGS,
        "interaction_config_path": "users.yaml",
        "tool_config_path": "shipped.yaml",
    }
    prompt = [{"role": "user", "content": "6 * 7?"}]
    user = {"name": "gsm8k", "ground_truth": "42", "query": None}
    row = {"prompt": prompt, "extra_info": {"interaction_kwargs": user}}
    steps = play_here("tools", params, [Turn("#### 41"), Turn("#### 42")], row).steps
    assert [step.done for step in steps] == [False, True]
    assert steps[0].messages[0]["role"] == "user"
    assert [step.info["turn_scores"] for step in steps] == [[0.0], [1.0]]

    row["extra_info"] = {"interaction_kwargs": {"name": "patient", "query": "and?"}}
    turns = [turn_of("calc_gsm8k_reward", answer="1"), Turn("a"), Turn("b"), Turn("c")]
    steps = play("tools", params, turns, row).steps
    roles = ["user", "assistant", "tool", "assistant"]
    assert [step.messages[0]["content"] for step in steps[1:3]] == [
        f"and? {roles}",
        f"and? {[*roles, 'user', 'assistant']}",
    ]
    assert steps[3] == Step([], None, True, (), {"turn_scores": [0.5], "interaction": {"a": 1}})
    assert "finalized True" in Path("environment-0.log").read_text(encoding="utf-8")
    row["extra_info"] = {"interaction_kwargs": {"name": "gsm8"}}
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        play_here("tools", params, row=row)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: {}", "has no list 'tools'"),
        ("tools: [{}]", "class_name is ''"),
        ("tools: [{class_name: nothing.Tool}]", "No module named 'nothing'"),
        ("tools: [{class_name: old_tools.Tool}]", "has no attribute 'Tool'"),
        ("tools: [{class_name: old_tools.OldTool}]", "OldTool cannot be built"),
        ("tools: [", "is no YAML"),
    ],
)
def test_wrong_configurations(folder: Path, text: str, message: str) -> None:
    (folder / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_here("tools", {"tool_config_path": "tools.yaml"})


def test_results_of_tools() -> None:
    class Response:
        text = "t"

    for value, expected in (
        ("t", ("t", None, {})),
        ({"a": 1}, ('{"a": 1}', None, {})),
        (None, ("", None, {})),
        (Response(), ("t", None, {})),
        ((Response(), 1), ("t", 1.0, {})),
        (("t", None, {"m": 2}), ("t", None, {"m": 2})),
    ):
        found = result_of(value)
        assert (found.text, found.reward, dict(found.metrics)) == expected
    Response.video = [object()]  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="videos"):
        result_of(Response())

"""Tool and interaction for GSM8K under verl's names, for its configurations without verl."""

from __future__ import annotations

import json
import uuid
from typing import Any

from rlctl.plugins.agents.environments.verl.base_classes import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from rlctl.runtime.rewards.gsm8k import METHODS
from rlctl.runtime.serving.chat import to_schema


def gsm8k_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right final number, `format_score` for another one, else 0."""
    found, is_right = METHODS[f"verl_{method}"](solution_str, str(ground_truth))
    if not found:
        return 0.0
    return score if is_right else format_score


class Gsm8kTool(BaseTool):
    """Tool to which the policy submits its result of a GSM8K problem, to learn if it is right.

    `create_kwargs.ground_truth` of the row is the right number. The reward of a call is 0 for a
    result that is better than the one before and -0.05 otherwise.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> Any:
        """Return the schema of the YAML file, or the usual one."""
        return super().get_openai_tool_schema() or OpenAIFunctionToolSchema.model_validate(
            _GSM8K_SCHEMA
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **_: Any
    ) -> Any:
        """Start an instance for a problem."""
        name = instance_id or str(uuid.uuid4())
        self._states[name] = {"result": "", "ground_truth": ground_truth, "reward": 0.0}
        return name, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        """Score the submitted result."""
        text = parameters.get("answer", "")
        if not isinstance(text, str):
            text = json.dumps(text)
        state = self._states[instance_id]
        shown = text.removeprefix("#### ")
        state["result"] = f"#### {shown}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"submitted {shown!r}: reward {reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Return 1 if the latest result is right, else 0."""
        state = self._states[instance_id]
        return gsm8k_score(state["result"], state["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **_: Any) -> None:
        """Forget the instance."""
        self._states.pop(instance_id, None)


class Gsm8kInteraction(BaseInteraction):
    """User who asks for another try until the result of a GSM8K problem is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **_: Any
    ) -> str:
        """Start an instance for a problem."""
        name = instance_id or str(uuid.uuid4())
        self._truths[name] = ground_truth
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Score the latest message of the policy; a wrong result gets another try."""
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        score = gsm8k_score(texts[-1] if texts else "", self._truths[instance_id], "flexible")
        if score == 1.0:
            return True, "The result is right.", score, {}
        return False, "The result is wrong. Think again and give another one.", score, {}

    async def finalize_interaction(self, instance_id: str = "", **_: Any) -> None:
        """Forget the instance."""
        self._truths.pop(instance_id, None)


_GSM8K_SCHEMA = to_schema(
    "calc_gsm8k_reward",
    "Score a result of a GSM8K problem: 1.0 if it is right, else 0.0.",
    {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final number."}},
        "required": ["answer"],
    },
)

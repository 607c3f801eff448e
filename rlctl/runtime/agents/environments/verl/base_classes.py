"""Base classes of verl's tools and interactions, for files that import them."""

from __future__ import annotations

import uuid
from typing import Any

from rlctl.runtime.agents.environments.verl.schemas import ToolResponse


class BaseTool:
    """Base class of tools, with verl's methods. The YAML file or the class has the schema."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema of the tool."""
        return self.__dict__.get("tool_schema")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Start an instance and return its ID."""
        del kwargs
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return response, reward and metrics of one call."""
        del instance_id, parameters, kwargs
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's score of the episode."""
        del instance_id, kwargs
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the instance."""


class BaseInteraction:
    """Base class of simulated users, with verl's methods."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start an instance and return its ID."""
        del kwargs
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return the end of the conversation or not, the user's text, a score and metrics."""
        del instance_id, messages, kwargs
        return True, "", 0.0, {}

    async def calculate_score(self) -> float:
        """Return the score of the conversation."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """Release the instance."""

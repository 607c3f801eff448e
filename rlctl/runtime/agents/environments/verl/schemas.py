"""Types of verl's tools, for classes that import them while verl is not installed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    """Model that keeps fields which it does not know."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """A parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """Parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool in the form of OpenAI's API."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Result of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return True if there is neither text nor image nor video."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Return True if there is a text and nothing else."""
        return bool(self.text) and not self.image and not self.video

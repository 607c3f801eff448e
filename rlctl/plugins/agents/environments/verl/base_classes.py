"""verl's base classes of tools and interactions, and their types, for files that import them."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.stand_ins import provide
from rlctl.plugins.user_code import report_errors


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


TYPES = (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)


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


F = TypeVar("F", bound=Callable[..., Any])


def load_class(class_name: str, where: str, folder: Path) -> Callable[..., Any]:
    """Return the class `package.module.Class`; `folder` is also searched for modules.

    Raises ConfigError if it cannot be imported.
    """
    provide_verl()
    module_name, _, name = class_name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"class_name is {class_name!r}", where=where, hint="class_name: package.module.Class"
        )
    for path in (str(Path.cwd()), str(folder.resolve())):
        if path not in sys.path:
            sys.path.append(path)
    hint = "the module must be importable from the current folder or that of the YAML file"
    failure = f"the class {class_name} cannot be imported"
    with report_errors(failure, class_name, where=where, hint=hint):
        return getattr(importlib.import_module(module_name), name)


def provide_verl() -> None:
    """Offer the modules of verl that tools and interactions import, unless it is installed."""
    from rlctl.plugins.agents.environments import function_tools
    from rlctl.plugins.agents.environments.verl import verl_gsm8k

    types = {kind.__name__: kind for kind in TYPES}
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool},
        "verl.tools.schemas": types,
        "verl.tools.function_tool": {"function_tool": function_tools.function_tool},
        "verl.tools.gsm8k_tool": {"Gsm8kTool": verl_gsm8k.Gsm8kTool},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": verl_gsm8k.Gsm8kInteraction},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": _untraced},
        "verl.utils.reward_score": {},
        "verl.utils.reward_score.gsm8k": {"compute_score": verl_gsm8k.gsm8k_score},
    }
    provide(contents)


def _untraced(function: F) -> F:
    """Return `function`: calls are not traced."""
    return function

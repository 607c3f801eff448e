"""verl's tools and interactions (simulated users), which YAML files configure.

A tool is a class with create, execute, calc_reward and release. Classes of both generations work:
of v0.5, whose `execute` returns (text, reward, metrics), and of 0.7 to 0.9, which return a
ToolResponse and get `agent_data`. As in v0.5, an instance lives for one episode: it is created at
its start, and released at its end after `calc_reward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.mcp_tools import tools_of_servers
from rlctl.plugins.agents.environments.protocol import Step, checked_number
from rlctl.plugins.agents.environments.tool import EpisodeInfo, Tool, ToolResult, accepted, as_text
from rlctl.plugins.agents.environments.verl.base_classes import OpenAIFunctionToolSchema, load_class
from rlctl.plugins.user_code import check_file, report_errors
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import Message, ToolSchema

_MCP = "mcp"  # `config.type` of servers whose tools are used


async def tools_of_config(config_path: str) -> list[Tool]:
    """Return the tools of a YAML file as in verl's `multi_turn.tool_config_path`.

    Raises ConfigError for a missing file, wrong entries, and classes that cannot be built.
    """
    file = Path(config_path).expanduser()
    entries = entries_of(file, "tools", "tool configuration")
    tools: list[Tool] = []
    for index, entry in enumerate(entries):
        where = f"{config_path}: tools[{index}]"
        config = dict(entry.get("config") or {})
        if config.get("type") == _MCP:
            servers = {**(config.get("mcp") or {}), **(entry.get("mcp") or {})}
            path = str(servers.get("mcp_servers_config_path") or "")
            tools += await tools_of_servers(path, servers.get("tool_selected_list"))
            continue
        build = load_class(str(entry.get("class_name") or ""), where, file.parent)
        with report_errors(f"the tool {entry['class_name']} cannot be built", where=where):
            schema = entry.get("tool_schema")
            parsed = schema and OpenAIFunctionToolSchema.model_validate(schema)
            tools.append(VerlTool(build(config=config, tool_schema=parsed)))
    return tools


def entries_of(file: Path, key: str, noun: str) -> list[dict[str, Any]]:
    """Return the list at `key` of a YAML file. Raises ConfigError for a file without one."""
    import yaml  # another interpreter (`agent.python`) may not have it

    check_file(file, f"the {noun} does not exist")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"the {noun} is no YAML: {error}", where=str(file)) from error
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"the {noun} has no list {key!r}",
            where=str(file),
            hint=f"{key}: [{{class_name: package.module.Class, config: {{}}}}]",
        )
    return entries


@dataclass
class AgentData:
    """State of an episode that tools of verl 0.7 to 0.9 get as `agent_data`."""

    request_id: str
    messages: list[dict[str, Any]]
    tools_kwargs: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlTool:
    """An object with the methods of verl's BaseTool, shared by the episodes of a process."""

    is_lenient = True  # its classes convert numbers where the schema says string

    def __init__(self, tool: Any) -> None:
        self.tool = tool
        self.schema: ToolSchema = schema_as_dict(tool.get_openai_tool_schema())

    async def session(self, episode: EpisodeInfo) -> VerlSession:
        """Create an instance for the episode, with `create_kwargs` of its row."""
        name = self.schema["function"]["name"]
        session = VerlSession(self.tool, episode, episode.tools_kwargs.get(name) or {})
        await session.create()
        return session


class VerlSession:
    """Instance of a tool in one episode."""

    def __init__(
        self, tool: Any, episode: EpisodeInfo, kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._tool = tool
        self._kwargs = kwargs
        self._id: Any = episode.id
        self._data = AgentData(episode.id, list(episode.messages), dict(episode.tools_kwargs))

    async def create(self) -> None:
        """Call `create` of the tool; it may replace the ID of the instance."""
        kwargs = dict(self._kwargs.get("create_kwargs") or {})
        extra = accepted(self._tool.create, create_kwargs=kwargs)
        created = await call(self._tool.create, self._id, **{**extra, **kwargs})
        if isinstance(created, tuple):
            self._id = created[0]
        elif created:
            self._id = created

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call `execute` of the tool."""
        kwargs = dict(self._kwargs.get("execute_kwargs") or {})
        extra = accepted(self._tool.execute, agent_data=self._data)
        found = await call(self._tool.execute, self._id, dict(arguments), **{**extra, **kwargs})
        result = result_of(found)
        if result.reward is not None:
            self._data.tool_rewards.append(result.reward)
        return result

    async def score(self) -> float | None:
        """Return the result of `calc_reward`, None if the class does not define it."""
        method = getattr(self._tool, "calc_reward", None)
        if method is None or getattr(method, "__qualname__", "") == "BaseTool.calc_reward":
            return None
        kwargs = dict(self._kwargs.get("calc_reward_kwargs") or {})
        return await call(method, self._id, **kwargs)

    async def close(self) -> None:
        """Call `release` of the tool."""
        kwargs = dict(self._kwargs.get("release_kwargs") or {})
        await call(self._tool.release, self._id, **kwargs)


def result_of(value: Any) -> ToolResult:
    """Return the result of what `execute` returned: a response, or (response, reward, metrics)."""
    parts = value if isinstance(value, tuple) else (value,)
    response, reward, metrics = (*parts, None, None)[:3]
    images: tuple[Any, ...] = ()
    if not isinstance(response, str | Mapping | list | None) and hasattr(response, "text"):
        if getattr(response, "video", None):
            raise TypeError("the result has videos, which are not supported")
        images = tuple(getattr(response, "image", None) or ())
        response = response.text
    number = None if reward is None else float(reward)
    return ToolResult(as_text(response), number, dict(metrics or {}), images)


def schema_as_dict(schema: Any) -> ToolSchema:
    """Return a schema, a dictionary or an object of pydantic, without entries that are None."""
    if isinstance(schema, Mapping):
        return dict(schema)
    return {"type": "function", **schema.model_dump(exclude_none=True, exclude_unset=True)}


def interactions_of_config(path: str) -> dict[str, Any]:
    """Return the interactions of a YAML file by name, as in verl's `interaction_config_path`.

    Raises ConfigError for a missing file, wrong entries, and classes that cannot be built.
    """
    file = Path(path).expanduser()
    found: dict[str, Any] = {}
    for index, entry in enumerate(entries_of(file, "interaction", "interaction configuration")):
        where = f"{path}: interaction[{index}]"
        class_name = str(entry.get("class_name") or "")
        build = load_class(class_name, where, file.parent)
        default = class_name.rpartition(".")[2].removesuffix("Interaction").lower()  # verl's
        name = str(entry.get("name") or default)
        if name in found:
            raise ConfigError(f"two interactions have the name {name!r}", where=where)
        with report_errors(f"the interaction {class_name} cannot be built", where=where):
            found[name] = build(config={**(entry.get("config") or {}), "name": name})
    if not found:
        raise ConfigError("the interaction configuration is empty", where=path)
    return found


class InteractionSession:
    """A simulated user in one episode.

    As in verl, its scores of turns reach the reward functions; they are no rewards themselves.
    """

    def __init__(self, interaction: Any, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        self._interaction = interaction
        self._id = instance_id
        self._kwargs = dict(kwargs)

    async def start(self) -> None:
        """Start an instance with `extra_info.interaction_kwargs` of the row."""
        start = self._interaction.start_interaction
        self._id = await call(start, self._id, **self._kwargs) or self._id

    async def step(self, messages: Sequence[Message]) -> Step:
        """Return the user's reply to the conversation so far."""
        generate = self._interaction.generate_response
        found = await call(generate, self._id, list(messages), **self._kwargs)
        is_over, text, score, data = found
        info: dict[str, Any] = {"turn_scores": [checked_number(score, "the score of a turn")]}
        if data:
            info["interaction"] = dict(data)
        if is_over:
            return Step(done=True, info=info)
        return Step([{"role": "user", "content": str(text)}], info=info)

    async def close(self) -> None:
        """Finalize the instance."""
        finalize = self._interaction.finalize_interaction
        await call(finalize, **accepted(finalize, instance_id=self._id))


def chosen(interactions: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the interaction that `name` of `kwargs` names, or the only one.

    Raises ValueError for an unknown name, or if there are several and none is named.
    """
    name = str(kwargs.get("name", ""))
    if not name and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name not in interactions:
        hint = plugins.suggestion(name, list(interactions))
        raise ValueError(f"extra_info.interaction_kwargs.name is {name!r}; {hint}")
    return interactions[name]

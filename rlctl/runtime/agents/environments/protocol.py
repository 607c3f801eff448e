"""Protocol of environments, and the types that an episode exchanges with them.

An environment answers the turns of one episode: with the results of tools, the words of a user, or
the observations of a game. It runs in a worker process without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# A chat message as in OpenAI's API: `role`, `content`, and optionally `tool_calls` (of the role
# "assistant"), `tool_call_id` and `name` (of the role "tool").
Message = dict[str, Any]
# {"type": "function", "function": {"name", "description", "parameters": JSON schema}}
ToolSchema = dict[str, Any]
# A row of the data file: prompt, data_source, ground_truth, extra_info and the like.
Row = Mapping[str, Any]


def to_schema(name: Any, description: str, parameters: Mapping[str, Any]) -> ToolSchema:
    """Return the schema of a tool; `parameters` is a JSON schema."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def to_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return an entry of `tool_calls` of a message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, with its arguments parsed."""

    id: str  # unique in the episode
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Malformed call in a text; the model gets the reason as a tool message."""

    text: str
    reason: str


@dataclass(frozen=True)
class Turn:
    """Text that the policy wrote, without its calls, and the calls in their order."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


@dataclass(frozen=True)
class ToolUse:
    """Record of one call, for metrics and transcripts."""

    name: str
    seconds: float
    error: str | None = None  # None, "unknown", "malformed", "raised", "timeout" or "too_many"


@dataclass(frozen=True)
class Step:
    """Reply of an environment to a turn.

    The policy continues after `messages` unless `done` is True, which ends the episode. `reward`
    belongs to the turn; None is no reward.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    uses: Sequence[ToolUse] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Counterpart of the policy in one episode. Its calls come one at a time."""

    async def reset(self, row: Row) -> Sequence[Message] | str | None:
        """Start the episode of `row`.

        Returns the messages that replace the row's prompt, a text that is appended to its last
        message of a user, or None to leave it as it is.
        """
        ...

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """Tools that the policy may call, known after `reset`; empty if there are none."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Reply to a turn of the policy."""
        ...

    async def score(self) -> float | Mapping[str, float] | None:
        """Return the score of the finished episode.

        A mapping has the key `score`; its other entries are components. None, or a mapping without
        `score`: the run's reward functions score the text.
        """
        ...

    async def close(self) -> None:
        """Release what the episode holds. Called once, also after an error."""
        ...

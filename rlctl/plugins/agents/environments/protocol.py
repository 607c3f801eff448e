"""Protocol of environments, the types that an episode exchanges with them, and their JSON.

An environment answers the turns of one episode: with the results of tools, the words of a user, or
the observations of a game. It runs in a worker process without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rlctl.data_prep.images import content_of, data_url, images_of
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn

# A row of the data file: prompt, data_source, ground_truth, extra_info and the like.
Row = Mapping[str, Any]


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


def step_to_json(step: Step) -> dict[str, Any]:
    """Return `step` as a dictionary. Raises TypeError or ValueError if it is not valid."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not a Step")
    return {
        "messages": checked_messages(step.messages),
        "reward": None if step.reward is None else checked_number(step.reward, "the reward"),
        "done": bool(step.done),
        "uses": [asdict(use) for use in step.uses],
        "info": dict(step.info),
    }


def step_from_json(data: Mapping[str, Any]) -> Step:
    """Return the step of `step_to_json`."""
    return Step(**{**data, "uses": tuple(ToolUse(**use) for use in data["uses"])})


def checked_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return chat messages with their content. Raises TypeError for anything else."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"a message is {message!r}, not a dictionary with role and content")
    return [
        {**message, "content": _checked_content(message.get("content"))} for message in messages
    ]


def _checked_content(content: Any) -> str | list[dict[str, str]]:
    """Return a text, or content parts with the files of images as text in base64."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError(f"the content of a message is {content!r}, not a text")
    parts = [_checked_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _checked_part(part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise TypeError(f"a content part is {part!r}, neither a text nor an image")
    value = part.get(kind)
    url = value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value
    (image,) = images_of([url])
    return {"type": "image", "image": data_url(content_of(image))}


def checked_score(score: Any) -> float | dict[str, float] | None:
    """Return a score, its components, or None. Raises TypeError or ValueError for others."""
    if score is None:
        return None
    if isinstance(score, Mapping):
        return {str(name): checked_number(value, name) for name, value in score.items()}
    return checked_number(score, "the score")


def checked_number(value: Any, name: str) -> float:
    """Return `value` as a finite float. Raises TypeError or ValueError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, not a finite number")
    return number

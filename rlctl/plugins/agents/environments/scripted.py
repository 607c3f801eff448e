"""Episodes with scripted turns: a trial of an environment without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlctl.data_prep.message_parts import text_of
from rlctl.errors import ConfigError, NotFoundError
from rlctl.plugins.agents.environments.environment_pool import EnvironmentFailed, EnvironmentPool
from rlctl.plugins.agents.environments.protocol import Row
from rlctl.runtime.serving.chat import Message, ToolCall, ToolSchema, Turn

Parse = Callable[[str, Sequence[ToolSchema]], Turn]


@dataclass
class Transcript:
    """Record of one episode. `outcome` is done, failed, or script ended."""

    messages: list[Message] = field(default_factory=list)
    tools: list[ToolSchema] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)  # reward, seconds, uses, info
    score: float | Mapping[str, float] | None = None
    outcome: str = "script ended"
    error: str | None = None
    seconds: float = 0.0


async def play(
    pool: EnvironmentPool, row: Row, key: str, script: Sequence[Any], parse: Parse
) -> Transcript:
    """Play one episode of `row`; each entry of `script` is a turn: see `read_script`."""
    transcript = Transcript()
    started = time.monotonic()
    try:
        remote = await pool.open(row, key)
        try:
            transcript.tools = remote.tools
            messages = opening(list(row.get("prompt") or []), remote.messages)
            transcript.messages = [_as_text(message) for message in messages]
            for index, entry in enumerate(script):
                turn = _turn(entry, index, parse, remote.tools)
                transcript.messages.append(_assistant(turn))
                sent = time.monotonic()
                step = await remote.step(turn)
                transcript.messages += [_as_text(message) for message in step.messages]
                transcript.turns.append(
                    {
                        "reward": step.reward,
                        "seconds": time.monotonic() - sent,
                        "uses": [asdict(use) for use in step.uses],
                        "info": dict(step.info),
                    }
                )
                if step.done:
                    transcript.outcome = "done"
                    break
            transcript.score = await remote.score()
        finally:
            await remote.close()
    except EnvironmentFailed as error:
        transcript.outcome = "failed"
        transcript.error = f"{error.kind}: {error.text}"
    transcript.seconds = time.monotonic() - started
    return transcript


def opening(prompt: list[Message], reset: list[Message] | str | None) -> list[Message]:
    """Return the messages of an episode before its first turn, given what `reset` returned."""
    if reset is None:
        return prompt
    if not isinstance(reset, str):
        return list(reset)
    users = [index for index, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        return [*prompt, {"role": "user", "content": reset}]
    last = prompt[users[-1]]
    changed = {**last, "content": f"{last['content']}\n{reset}"}
    return [*prompt[: users[-1]], changed, *prompt[users[-1] + 1 :]]


def read_script(path: Path) -> list[list[Any]]:
    """Return the turns of each episode of a file: one turn a line, a blank line between episodes.

    A line is the text of a turn, as the model would write it; a text in JSON (for line breaks); or
    an object {"text": ..., "calls": [{"name": ..., "arguments": {...}}]}.
    """
    if not path.is_file():
        raise NotFoundError("the file does not exist", where=str(path))
    blocks: list[list[Any]] = [[]]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            blocks.append([])
            continue
        entry: Any = line
        if line.lstrip().startswith(('{"', '"')):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"no JSON: {error}", where=f"{path}:{number}") from error
        blocks[-1].append(entry)
    return [block for block in blocks if block] or [[]]


def _as_text(message: Message) -> Message:
    """Return a message with `<image>` for each of its images."""
    return {**message, "content": text_of(message["content"])}


def _turn(entry: Any, index: int, parse: Parse, tools: Sequence[ToolSchema]) -> Turn:
    if isinstance(entry, str):
        return parse(entry, tools) if tools else Turn(entry)
    calls = [
        ToolCall(f"call{index}{number:04d}", call["name"], call.get("arguments") or {})
        for number, call in enumerate(entry.get("calls") or [])
    ]
    return Turn(entry.get("text", ""), tuple(calls))


def _assistant(turn: Turn) -> Message:
    calls = map(asdict, turn.calls)
    malformed = map(asdict, turn.malformed)
    message: Message = {"role": "assistant", "content": turn.text}
    return {**message, "calls": list(calls), "malformed": list(malformed)}

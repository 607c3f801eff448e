"""Records of episodes: what happened turn by turn, for metrics, samples, reports, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Message:
    """A message of an episode after its prompt.

    `role` is that of the chat: assistant (the policy's turn), tool, user or system. `reward` is
    what the environment gave for a turn, `seconds` the time until the message was complete.
    `version` is that of the weights that wrote a turn: updates of the policy since the run began.
    """

    role: str
    text: str
    trained: bool  # True if the policy wrote it
    num_tokens: int = 0
    seconds: float = 0.0
    reward: float | None = None
    name: str | None = None  # of the tool
    version: int | None = None


@dataclass(frozen=True)
class Use:
    """A tool call: its time, and the kind of its error or None."""

    tool: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Episode:
    """An episode that has ended.

    `outcome` is why: done (the environment, or a turn without calls), stop (of a single turn),
    length, max_turns, or the kind of a failure. `error` is the text of a failure, None otherwise.
    `opening` replaces the messages of the row's prompt where the environment changed them.
    `score` is the environment's, None if reward functions score the text.
    """

    outcome: str
    messages: Sequence[Message] = ()
    uses: Sequence[Use] = ()
    seconds: float = 0.0
    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    num_retokenized: int = 0  # tokens that the engine did not see as they are trained on
    opening: Sequence[Message] = ()
    # For reward functions: the scores of turns and the rewards of tool calls, or of turns instead.
    turn_scores: Sequence[float] = ()
    tool_rewards: Sequence[float] = ()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Build an episode from `asdict` of one; raise TypeError for missing or unknown fields."""
        parts = {
            **{
                name: tuple(Message(**message) for message in fields.get(name, ()))
                for name in ("messages", "opening")
            },
            "uses": tuple(Use(**use) for use in fields.get("uses", ())),
            **{name: tuple(fields.get(name, ())) for name in ("turn_scores", "tool_rewards")},
        }
        return cls(**{**fields, **parts})

    @property
    def failed(self) -> bool:
        """True if the episode cannot be trained on."""
        return self.error is not None

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy wrote."""
        return sum(message.trained for message in self.messages)


def speaker(message: Message) -> str:
    """Return the role of a message, and the name of the tool that wrote it."""
    if not message.name:
        return message.role
    return f"{message.role} {message.name}"


def facts(message: Message) -> str:
    """Return what is known of a message: if it is trained on, tokens, reward and seconds."""
    found: list[str] = []
    if message.trained:
        found.append("trained")
    if message.num_tokens:
        found.append(f"{message.num_tokens} tokens")
    if message.reward is not None:
        found.append(f"reward {message.reward:g}")
    return ", ".join([*found, f"{message.seconds:.3g} s"])


def ending(episode: Episode) -> str:
    """Return why an episode ended, and its number of turns, calls by tool, and seconds."""
    turns = f"{episode.num_turns} turns"
    if episode.num_turns == 1:
        turns = "1 turn"
    return ", ".join([episode.outcome, turns, *_calls(episode.uses), f"{episode.seconds:.3g} s"])


def _calls(uses: Sequence[Use]) -> list[str]:
    """Return the number of calls of each tool and its errors by kind."""
    found = []
    for tool, number in Counter(use.tool for use in uses).items():
        errors = Counter(use.error for use in uses if use.tool == tool and use.error)
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        text = f"{tool or 'call'} {number}×"
        if kinds:
            text += f" ({kinds})"
        found.append(text)
    return found


def transcript(episode: Episode) -> str:
    """Return an episode turn by turn as plain text."""
    parts = [
        f"[{speaker(message)}: {facts(message)}]\n{message.text.strip()}"
        for message in episode.messages
    ]
    end = f"[{ending(episode)}]"
    if episode.error:
        end += f"\n{episode.error}"
    return "\n\n".join([*parts, end])

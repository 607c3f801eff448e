"""Episodes as text: the words that samples, reports and trackers show beside their messages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rlctl.tracking.episodes import Episode, Message, Use
from rlctl.tracking.tracker import Sample


def speaker(message: Message) -> str:
    """Return the role of a message, and the name of the tool that wrote it."""
    return f"{message.role} {message.name}" if message.name else message.role


def facts(message: Message) -> str:
    """Return what is known of a message: if it is trained on, tokens, reward and seconds."""
    found = ["trained"] if message.trained else []
    if message.num_tokens:
        found.append(f"{message.num_tokens} tokens")
    if message.reward is not None:
        found.append(f"reward {message.reward:g}")
    return ", ".join([*found, f"{message.seconds:.3g} s"])


def ending(episode: Episode) -> str:
    """Return why an episode ended, and its number of turns, calls by tool, and seconds."""
    turns = f"{episode.num_turns} turn{'' if episode.num_turns == 1 else 's'}"
    return ", ".join([episode.outcome, turns, *_calls(episode.uses), f"{episode.seconds:.3g} s"])


def _calls(uses: Sequence[Use]) -> list[str]:
    """Return the number of calls of each tool and its errors by kind."""
    found = []
    for tool, number in Counter(use.tool for use in uses).items():
        errors = Counter(use.error for use in uses if use.tool == tool and use.error)
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        found.append(f"{tool or 'call'} {number}×" + (f" ({kinds})" if kinds else ""))
    return found


def transcript(episode: Episode) -> str:
    """Return an episode turn by turn as plain text."""
    parts = [
        f"[{speaker(message)}: {facts(message)}]\n{message.text.strip()}"
        for message in episode.messages
    ]
    error = f"\n{episode.error}" if episode.error else ""
    return "\n\n".join([*parts, f"[{ending(episode)}]{error}"])


def with_transcript(sample: Sample) -> Sample:
    """Return a sample whose response is the transcript of its episode, if it has one."""
    if sample.episode is None:
        return sample
    return dataclasses.replace(sample, response=transcript(sample.episode))

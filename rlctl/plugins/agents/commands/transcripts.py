"""Transcripts of played episodes on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlctl.cli.console import stdout
from rlctl.cli.stderr import notice
from rlctl.cli.views.samples import ROLE_STYLES
from rlctl.terminal import visible
from rlctl.text import plural

if TYPE_CHECKING:
    from rlctl.plugins.agents.environments.scripted import Transcript


def print_transcripts(transcripts: Sequence[Transcript]) -> None:
    """Print the messages of each episode, its rewards, score and seconds."""
    for number, transcript in enumerate(transcripts):
        if number:
            stdout().print()
        _print_transcript(number, transcript)
    failed = sum(transcript.error is not None for transcript in transcripts)
    notice(f"{plural(len(transcripts), 'episode')}, {failed} failed")


def _print_transcript(number: int, transcript: Transcript) -> None:
    out = stdout()
    turns = iter(transcript.turns)
    out.print(Text(f"episode {number}", "bold underline"))
    for message in transcript.messages:
        role = message["role"]
        line = Text(f"{role:>9}  ", ROLE_STYLES.get(role, ""))
        out.print(line.append(visible(str(message["content"])), ""))
        for call in message.get("calls", ()):
            out.print(Text(f"{'':>11}→ {call['name']}({json.dumps(call['arguments'])})"))
        if role == "assistant" and (turn := next(turns, None)) is not None:
            out.print(Text(f"{'':>11}{_facts_of(turn)}", "dim"))
    score = "of the reward functions" if transcript.score is None else transcript.score
    out.print(Text(f"{transcript.outcome}; score {score}; {transcript.seconds:.3f} s"))
    if transcript.error:
        out.print(Text(visible(transcript.error), "red"))


def _facts_of(turn: Mapping[str, Any]) -> str:
    """Return the seconds, reward and errors of tools of a turn."""
    errors = [f"{use['name'] or 'call'}: {use['error']}" for use in turn["uses"] if use["error"]]
    facts = [f"{turn['seconds']:.3f} s"]
    if turn["reward"] is not None:
        facts.append(f"reward {turn['reward']:g}")
    return ", ".join([*facts, *errors])

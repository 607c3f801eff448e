"""Output of `rlctl show --samples`: responses with their scores, episodes turn by turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from rlctl.cli.console import notice, paged, stdout
from rlctl.monitoring.text import plural
from rlctl.terminal import visible
from rlctl.tracking.episodes import Episode
from rlctl.tracking.tracker import Sample
from rlctl.tracking.transcripts import ending, facts, speaker


def print_samples(
    step: int, samples: Sequence[Sample], number: int | None, sought: str | None
) -> None:
    """Print validation samples, through a pager on a terminal, and their number on stderr.

    The text `sought` is highlighted.
    """
    if not samples:
        notice(f"no sample of step {step} matches")
        return
    with paged():
        for sample in samples[:number]:
            print_sample(sample, sought)
    shown = len(samples[:number])
    notice(
        f"{shown} of {len(samples)} samples of step {step}"
        + ("; -n N shows more" if len(samples) > shown else "")
    )


def print_sample(sample: Sample, sought: str | None = None) -> None:
    """Print a sample, and an empty line."""
    mark = ("right", "bold green") if sample.right else ("wrong", "bold red")
    parts = "".join(f"  {name} {value:g}" for name, value in sample.components.items())
    head = (
        f"  score {sample.score:g}{parts}  {plural(sample.length, 'token')}  {sample.finish}"
        f"  {visible(sample.data_source)}"
    )
    stdout().print(Text.assemble(mark, (head, "dim")))
    _print_text("prompt", sample.prompt, sought)
    if sample.episode is None:
        _print_text("response", sample.response, sought)
    else:
        print_episode(sample.episode, sought)
    _print_text("truth", str(sample.ground_truth), sought)
    stdout().print()


def print_episodes(played: Sequence[tuple[str, Episode]]) -> None:
    """Print episodes with their prompts and scores, and the number of failures on stderr."""
    for number, (prompt, episode) in enumerate(played):
        stdout().print(Text(f"episode {number}", "bold underline"))
        _print_text("prompt", prompt, None)
        print_episode(episode)
        score = "of the reward functions" if episode.score is None else f"{episode.score:g}"
        parts = "".join(f"  {name} {value:g}" for name, value in episode.components.items())
        _print_text("score", f"{score}{parts}", None)
        stdout().print()
    failed = sum(episode.failed for _, episode in played)
    notice(f"{plural(len(played), 'episode')}, {failed} failed")


def print_episode(episode: Episode, sought: str | None = None) -> None:
    """Print the messages of an episode, why it ended, and its error."""
    for message in episode.messages:
        who = Text(visible(speaker(message)), "bold" if message.trained else "bold cyan")
        stdout().print(who.append(f"  {facts(message)}", "not bold dim"))
        stdout().print(_marked(message.text, sought))
    _print_text("outcome", ending(episode), None)
    if episode.error is not None:
        _print_text("error", episode.error, sought)


def _print_text(name: str, text: str, sought: str | None) -> None:
    stdout().print(Text.assemble((f"{name}: ", "bold"), _marked(text, sought)))


def _marked(text: str, sought: str | None) -> Text:
    """Return a text as a terminal may show it, with `sought` highlighted."""
    shown = Text(visible(text.strip()))
    if sought:
        shown.highlight_regex(re.compile(re.escape(sought), re.IGNORECASE), "black on yellow")
    return shown

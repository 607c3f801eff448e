"""Output of rows, responses with their scores, and episodes turn by turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from rlctl.cli.console import paged, print_table, stdout, table
from rlctl.cli.stderr import notice
from rlctl.data_prep.decoded_images import opened
from rlctl.data_prep.images import Image, content_of
from rlctl.episodes import Episode, ending, facts, speaker
from rlctl.errors import ConfigError
from rlctl.terminal import visible
from rlctl.text import plural
from rlctl.tracking.tracker import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.data_prep.rows import PromptRow


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
    summary = f"{shown} of {len(samples)} samples of step {step}"
    if len(samples) > shown:
        summary += "; -n N shows more"
    notice(summary)


def print_sample(sample: Sample, sought: str | None = None) -> None:
    """Print a sample, and an empty line."""
    mark = (sample.verdict, "bold green" if sample.right else "bold red")
    parts = "".join(f"  {name} {value:g}" for name, value in sample.components.items())
    head = (
        f"  score {sample.score:g}{parts}  {plural(sample.length, 'token')}  {sample.finish}"
        f"  {visible(sample.data_source)}"
    )
    stdout().print(Text.assemble(mark, (head, "dim")))
    _print_text("prompt", sample.prompt, sought)
    for digest in sample.images:
        _print_text("image", f"SHA-256 {digest}", None)
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
        score = "of the reward functions"
        if episode.score is not None:
            score = f"{episode.score:g}"
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


_WIDTH = 48
_PIXELS = 40  # of a side of a drawn image, at most: 20 lines


def print_scores(scored: Sequence[dict[str, Any]]) -> None:
    """Print one row per response: score, ground truth, end of the text, components or error."""
    rows = [
        (
            str(row["answer"]),
            f"{row['score']:g}",
            visible(str(row["ground_truth"])),
            visible(_end(row["response"])),
            row["error"]
            or ", ".join(f"{name} {value:g}" for name, value in row["components"].items()),
        )
        for row in scored
    ]
    columns = ["response", "score", "ground truth", "ends with", "details"]
    print_table(columns, rows, right=["response", "score"])


def print_pairs(pairs: Sequence[dict[str, Any]]) -> None:
    """Print one row per pair: both scores, their difference, and the ends of both texts."""
    rows = [
        (
            str(row["pair"]),
            f"{row['chosen']:.4g}",
            f"{row['rejected']:.4g}",
            f"{row['chosen'] - row['rejected']:+.4g}",
            row["error"] or visible(_end(row["chosen_response"], _WIDTH // 2)),
            visible(_end(row["rejected_response"], _WIDTH // 2)),
        )
        for row in pairs
    ]
    columns = ["pair", "chosen", "rejected", "margin", "chosen ends with", "rejected ends with"]
    print_table(columns, rows, right=columns[:4])


def _end(text: str, width: int = _WIDTH) -> str:
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    return "…" + line[1 - width :]


ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold", "tool": "yellow"}


def print_environment(shown: Mapping[str, Any]) -> None:
    """Print the description, the settings and the tools of an environment."""
    out = stdout()
    out.print(Text(f"{shown['name']}: {shown['description']}"))
    if shown["settings"]:
        rows = [
            (setting["name"], json.dumps(setting["default"], default=str), setting["description"])
            for setting in shown["settings"]
        ]
        out.print(table(["setting", "default", "description"], rows))
    for tool in shown["tools"]:
        out.print(Text(json.dumps(tool, indent=2, ensure_ascii=False)))


def print_row(entry: dict[str, Any], images: Sequence[Image] = ()) -> None:
    """Print one row of `rlctl data show`: facts, prompt, images, ground truth and extra info."""
    facts = [entry["data_source"], entry["ability"], f"reward style {entry['style']}"]
    if "num_tokens" in entry:
        facts.append(f"{entry['num_tokens']} tokens")
    text = entry.get("rendered") or "\n".join(
        f"{message['role']}: {message['content']}" for message in entry["prompt"]
    )
    extra = json.dumps(entry["extra_info"], ensure_ascii=False, default=str)
    out = stdout()
    out.print(
        Text(f"row {entry['row']}", style="bold"),
        Text(visible(" · ".join(str(fact) for fact in facts if fact)), style="dim"),
    )
    out.print(Text(visible(text)))
    for name, image in zip_longest(entry["images"], images):
        out.print(Text.assemble(("image: ", "bold"), visible(name)))
        if image is not None and (drawn := _drawn(image, out)) is not None:
            out.print(drawn)
    out.print(Text.assemble(("ground truth: ", "bold"), visible(str(entry["ground_truth"]))))
    out.print(Text.assemble(("extra info: ", "bold"), visible(extra)))
    out.print()


def _drawn(image: Image, console: Console) -> Text | None:
    """Return an image in half blocks; None if it cannot be read, or drawn on this terminal."""
    shows = console.is_terminal and console.color_system in ("256", "truecolor")
    if not shows or console.no_color or not console.encoding.lower().startswith("utf"):
        return None
    try:
        picture = opened(content_of(image))
    except (ConfigError, ImportError):
        return None
    picture.thumbnail((min(_PIXELS, console.width), _PIXELS))
    width, height = picture.size
    text = Text()
    for top in range(0, height, 2):
        if top:
            text.append("\n")
        for left in range(width):
            colours = [
                Color.from_rgb(*picture.getpixel((left, row)))
                for row in range(top, min(top + 2, height))
            ]
            text.append("▀", Style(color=colours[0], bgcolor=[*colours, None][1]))
    return text


def _image_name(image: Image) -> str:
    from rlctl.data_prep.images import digest_of

    if isinstance(image, str):
        return image
    return f"{len(image):,} bytes, SHA-256 {digest_of(image)}"


def row_entry(
    index: int, row: PromptRow, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Return what is shown of a row; with a tokenizer also the rendered prompt and its length."""
    entry: dict[str, Any] = {
        "row": index,
        "data_source": row.data_source,
        "prompt": row.prompt,
        "images": [_image_name(image) for image in row.images],
        "ground_truth": row.ground_truth,
        "ability": row.ability,
        "style": row.style,
        "extra_info": row.extra_info,
    }
    if tokenizer:
        from rlctl.runtime.data.image_prompts import row_renderer
        from rlctl.runtime.data.tokenizer import encode_text

        text = row_renderer(tokenizer)(row)
        entry |= {"rendered": text, "num_tokens": len(encode_text(tokenizer, text))}
    return entry

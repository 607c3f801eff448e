"""Values of single tokens: the listener `token_values`, and their colours in text and HTML.

`trainer.listeners=[token_values]` keeps, of the first prompts of each step, what the update saw of
each response token, in `tokens/` of the run's folder.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rlctl.errors import NotFoundError
from rlctl.files import by_step, read_record, step_name, write_text
from rlctl.runs.run import Run
from rlctl.runs.subfolders import own_subfolder
from rlctl.terminal import visible

FOLDER = "tokens"
MOST_ROWS = 16  # of a step
MOST_TOKENS = 4096  # of a response


class Kind(NamedTuple):
    """Value of a token: its meaning, the sign of its colour, and the least value of a full one."""

    means: str
    sign: int  # 1: green above 0 and red below; −1: red, the larger the more
    least: float = 1e-9  # the largest value of a response has the full colour, if it is larger


KINDS = {
    "diff": Kind("log-prob of the trainer minus that of the engine", -1, 0.1),
    "advantage": Kind("advantage", 1),
    "entropy": Kind("entropy of the policy, in nats", -1, 0.1),
    "clip": Kind("1: an update clipped the token's ratio", -1),
    "mask": Kind("1: trained on; 0: the reply of a tool, or rejected", 1),
}


def token_rows(run: Run, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step, None being the last, and its responses. Raises NotFoundError without any."""
    files = by_step(run.path / FOLDER, ".jsonl")
    where = str(run.path)
    if not files:
        hint = "trainer.listeners=[token_values] keeps those of two prompts of each step"
        raise NotFoundError("this run has no values of tokens", where=where, hint=hint)
    chosen = max(files) if step is None else step
    if chosen not in files:
        hint = f"steps with tokens: {', '.join(map(str, files))}"
        raise NotFoundError(f"no tokens of step {step}", where=where, hint=hint)
    return chosen, [orjson.loads(line) for line in read_record(files[chosen]).splitlines()]


def coloured(row: Mapping[str, Any], kind: str) -> Iterator[tuple[str, float | None, float]]:
    """Yield each token: text, value (None: unknown), and colour from −1, red, to 1, green."""
    values: Sequence[float | None] = row.get(kind) or [None] * len(row["tokens"])
    _, sign, least = KINDS[kind]
    largest = max([least, *(abs(value) for value in values if value is not None)])
    for text, value in zip(row["tokens"], values, strict=True):
        share = (value or 0.0) / largest
        if sign < 0:
            share = -abs(share)
        yield text, value, share


def plain(row: Mapping[str, Any], kind: str) -> str:
    """Return the tokens of a response with their values as text."""
    parts: list[str] = []
    for text, value, _ in coloured(row, kind):
        shown = "-" if value is None else f"{value:.3g}"
        parts.append(f"{visible(text)}‹{shown}›")
    return "".join(parts)


def page(run: Run, step: int | None, kind: str) -> str:
    """Return an HTML page of the responses of a step, coloured by `kind`."""
    if kind not in KINDS:
        kind = "advantage"
    at, rows = token_rows(run, step)
    key = html.escape(run.key)
    escape = html.escape
    steps = by_step(run.path / FOLDER, ".jsonl")

    def link(text: str, number: int, name: str) -> str:
        target = f"?run={key}&amp;step={number}&amp;by={name}"
        if (number, name) == (at, kind):
            return f"<b>{text}</b>"
        return f'<a href="{target}">{text}</a>'

    parts = [
        f"<!doctype html><meta charset=utf-8><title>{key}: tokens</title>",
        f"<h1>{key}, step {at}</h1><p>{' · '.join(link(n, at, n) for n in KINDS)}</p>",
        f"<p>steps {' '.join(link(str(n), n, kind) for n in steps)}</p>",
        f"<p>{escape(KINDS[kind].means)}</p>",
    ]
    for row in rows:
        spans = "".join(_span(*token) for token in coloured(row, kind))
        parts.append(f"<hr><pre>{escape(row['prompt'])}</pre><p>score {row['score']:g}</p>")
        parts.append(f'<pre style="white-space:pre-wrap">{spans}</pre>')
    return "\n".join(parts)


def _span(text: str, value: float | None, strength: float) -> str:
    title = "" if value is None else f"{value:.4g}"
    colour = "0,160,0" if strength > 0 else "220,0,0"
    background = f"rgba({colour},{abs(strength):.2f})"
    return f'<span title="{title}" style="background:{background}">{html.escape(text)}</span>'


@dataclass
class Recorded:
    """Values of the tokens of some responses of a step."""

    batch: Any
    diff: Any  # (T,) as all
    entropy: Any
    log_probs: Any
    clip: Any

    def rows(self, decode: Callable[[Sequence[int]], str]) -> Iterator[dict[str, Any]]:
        """Yield a JSON object for each response."""
        ids = self.batch.response_ids
        mask = self.batch.response_mask
        fields = {
            "diff": ids.like(self.diff),
            "entropy": ids.like(self.entropy),
            "clip": ids.like(self.clip),
            "mask": mask,
        }
        if (advantages := getattr(self.batch, "advantages", None)) is not None:
            fields["advantage"] = advantages
        values = {name: field.rows() for name, field in fields.items()}
        scores = getattr(self.batch, "scores", None)
        rows = zip(self.batch.prompt_ids.rows(), ids.rows(), strict=True)
        for i, (prompt, response) in enumerate(rows):
            yield {
                "prompt": decode(prompt.tolist()),
                "score": 0.0 if scores is None else float(scores[i]),
                "tokens": [decode([token]) for token in response.tolist()[:MOST_TOKENS]],
                **{
                    name: [_number(x) for x in rows_of[i].tolist()[:MOST_TOKENS]]
                    for name, rows_of in values.items()
                },
            }


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


class RecordingActor:
    """Actor that passes calls on, and shows the batch of each update to `on_update` before it."""

    def __init__(self, actor: Any, on_update: Callable[[Any, Any], None]) -> None:
        self._actor = actor
        self._on_update = on_update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update(self, batch: Any, *arguments: Any) -> Any:
        """See `Actor`."""
        self._on_update(self._actor, batch)
        return self._actor.update(batch, *arguments)

    def update_with_log_probs(self, batch: Any, *arguments: Any) -> Any:
        """See `Actor`."""
        self._on_update(self._actor, batch)
        return self._actor.update_with_log_probs(batch, *arguments)


def write_step(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], most: int) -> None:
    """Write the rows of a step, and delete those of the steps before the newest `most`."""
    target = own_subfolder(folder, FOLDER) / f"{step_name(step)}.jsonl"
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for file in list(by_step(target.parent, ".jsonl").values())[:-most]:
        file.unlink(missing_ok=True)

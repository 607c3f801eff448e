"""Model card of an export: README.md with metadata for the hub, results, settings and data.

Names, notes, metrics and settings come from data and from other people. They are written without
secrets, and escaped so that Markdown, HTML and YAML show them as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rlctl.files import read_record
from rlctl.recipes.role_table import ACTOR, Role
from rlctl.redaction import redact, redact_value, redact_word
from rlctl.runs.details import changed_settings
from rlctl.runs.run import Run
from rlctl.runs.run_dir import CONFIG_FILE
from rlctl.terminal import visible
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics
from rlctl.tracking.run_summary import (
    KL,
    LOSS,
    REWARD,
    RunSummary,
    figure,
    is_accuracy,
    percent_or_number,
    primary_metric,
)

Kind = Literal["merged", "adapter"]
CARD = "README.md"
MAX_POINTS = 12  # of a curve
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Markup of Markdown, tables, formulas and HTML; `_` inside a word is none.
_MARKUP = re.compile(r"[&<>\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
_ALGORITHM = {"name": "algorithm", "adv_estimator": "advantages"}


def model_card(run: Run, step: int, role: Role, kind: Kind) -> str:
    """Return the README.md of the model of `role` after `step`, from the run's record."""
    changed = changed_settings(run.path)
    settings = {key: redact_value(change["value"], key) for key, change in changed.items()}
    base = str(settings.get(f"{role.model_key}.path") or "unknown")
    rows = [row for row in read_metrics(run.path / METRICS_FILE) if int(row["step"]) <= step]
    metric = primary_metric(rows)
    points: list[tuple[int, float]] = []
    if metric is not None:
        values = ((int(row["step"]), figure(row, (metric,))) for row in rows)
        points = [(at, value) for at, value in values if value is not None]
    recipe = "unknown"
    command: Sequence[str] = ()
    data: Mapping[str, Any] = {}
    versions: Mapping[str, Any] = {}
    commit = None
    if record := run.record:
        recipe = record.recipe
        command = record.command
        data = record.data
        versions = record.versions
        commit = (record.git or {}).get("commit")
    origin = {
        "base model": base,
        "recipe": recipe,
        **_algorithm(run.path / CONFIG_FILE),
        "trained": f"{step} steps, {run.created.date()}",
    }
    if run.labels.note:
        origin["note"] = run.labels.note
    if run.labels.tags:
        origin["tags"] = ", ".join(run.labels.tags)
    card = ModelCard.from_template(
        _metadata(run, role, kind, base, metric, points),
        template_path=str(_TEMPLATE),
        **{"text": _text, "table": _table, "run": run, "step": step, "base": base, "kind": kind},
        origin=origin,
        metric=metric,
        results=_results(run, metric, points),
        curve=_curve(rows, metric),
        command=_fenced(shlex.join(map(redact_word, command))),
        settings=settings,
        data=data,
        versions={name: value for name, value in versions.items() if value},
        commit=commit,
    )
    return f"{card}\n"


def _algorithm(config: Path) -> dict[str, str]:
    """Return the recorded names of the algorithm; empty if they cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        section = yaml.safe_load(read_record(config))["algorithm"]
        return {label: str(section[key]) for key, label in _ALGORITHM.items() if section.get(key)}
    return {}


def _metadata(
    run: Run,
    role: Role,
    kind: Kind,
    base: str,
    metric: str | None,
    points: Sequence[tuple[int, float]],
) -> ModelCardData:
    """Return the metadata of the card, as the hub reads it."""
    task = "text-generation" if role is ACTOR else "text-classification"
    data: dict[str, Any] = {}
    if metric is not None and points:
        parts = metric.split("/")  # val-core/SOURCE/acc/mean@1, val/loss
        source = _line("/".join(parts[1:-2]) or metric)
        short = "accuracy"
        if not is_accuracy(metric):
            short = _line(parts[-1] if len(parts) < 3 else parts[-2])
        value = float(f"{points[-1][1]:.6g}")
        result = EvalResult(task, source, source, short, value, metric_name=_line(metric))
        data = {"model_name": _line(run.name), "eval_results": [result]}
    if _HUB_NAME.fullmatch(base) and not Path(base).exists():
        data["base_model"] = base
    return ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag=task,
        tags=["rlctl", "reinforcement-learning"],
        **data,
    )


def _results(
    run: Run, metric: str | None, points: Sequence[tuple[int, float]]
) -> list[tuple[str, str]]:
    if metric is None or not points:
        return []
    (first, before) = points[0]
    (last, after) = points[-1]
    summary = RunSummary.from_rows(run.history())
    name = f"step {first}" if first else "before training"
    figures = {
        name: before,
        f"this model (validated at step {last})": after,
        f"best of the run (step {summary.best_step})": summary.best,
        "last of the run": summary.last,
    }
    return [(name, percent_or_number(metric, value)) for name, value in figures.items()]


def _curve(rows: Sequence[Mapping[str, float]], metric: str | None) -> list[list[object]]:
    """Return a table of up to `MAX_POINTS` steps, those with a validation if there are any."""
    shown = [row for row in rows if metric in row] or list(rows)
    names = [
        name
        for name in dict.fromkeys((metric, *REWARD, *KL, *LOSS))
        if name and any(figure(row, (name,)) is not None for row in shown)
    ]
    if len(shown) < 2 or not names:
        return []
    number = min(MAX_POINTS, len(shown))
    chosen = [shown[round(at * (len(shown) - 1) / (number - 1))] for at in range(number)]
    lines = [
        [int(row["step"]), *(percent_or_number(name, figure(row, (name,))) for name in names)]
        for row in chosen
    ]
    return [["step", *names], *lines]


def _line(value: object) -> str:
    """Return the value as one line without secrets and control characters."""
    return " ".join(visible(redact(str(value))).split())


def _text(value: object) -> str:
    """Return the value as one line that Markdown shows as it is."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", _line(value))


def _fenced(text: str) -> str:
    """Return a block of code with a fence that the text does not contain."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text)}\n{fence}"


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[_text(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)

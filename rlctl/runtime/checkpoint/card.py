"""Model card of an export: README.md with metadata for the hub, results, settings and data.

Names, notes, metrics and settings come from data and from other people. They are written without
secrets, and escaped so that Markdown, HTML and YAML show them as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from rlctl.monitoring.run_summary import (
    KL,
    LOSS,
    REWARD,
    RunSummary,
    figure,
    is_accuracy,
    primary_metric,
)
from rlctl.monitoring.text import percent_or_number
from rlctl.recipes.roles import ACTOR, Role
from rlctl.redaction import redact, redact_value, redact_word
from rlctl.runs.details import changed_settings
from rlctl.runs.run import Run
from rlctl.runs.run_dir import CONFIG_FILE
from rlctl.terminal import visible
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

Kind = Literal["merged", "adapter"]
CARD = "README.md"
MAX_POINTS = 12  # of a curve
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Markup of Markdown, tables, formulas and HTML; `_` inside a word is none.
_MARKUP = re.compile(r"[&<>\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")


def model_card(run: Run, step: int, role: Role, kind: Kind) -> str:
    """Return the README.md of the model of `role` after `step`, from the run's record."""
    changed = changed_settings(run.path)
    settings = {key: redact_value(each["value"], key) for key, each in changed.items()}
    config = _config(run.path)
    base = str(settings.get(f"{role.model_key}.path") or "unknown")
    rows = [row for row in read_metrics(run.path / METRICS_FILE) if int(row["step"]) <= step]
    metric = primary_metric(rows)
    front = _front(run, role, kind, base, _last(rows, metric))
    record = run.record
    origin = {
        "base model": base,
        "recipe": record.recipe if record else "unknown",
        **_algorithm(config),
        "trained": f"{step} steps, {run.created.date()}",
        **({"note": run.labels.note} if run.labels.note else {}),
        **({"tags": ", ".join(run.labels.tags)} if run.labels.tags else {}),
    }
    versions = {name: value for name, value in (record.versions if record else {}).items() if value}
    commit = (record.git or {}).get("commit") if record else None
    command = [redact_word(word) for word in record.command] if record else []
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True) + "---",
        f"# {_text(run.name)}, step {step}",
        f"{_text(base)}, trained with rlctl"
        + (": a LoRA adapter, to be loaded onto that model." if kind == "adapter" else "."),
        _table(("", ""), origin.items()),
        "## Results\n\n" + _results(run, rows, metric),
        *_curve(rows, metric),
        "## Training\n\n" + _fenced(shlex.join(command)),
        _table(("setting", "value"), settings.items()),
        "## Data\n\n" + _table(("file", "SHA-256"), record.data.items() if record else ()),
        "## Versions\n\n"
        + _table(("package", "version"), versions.items())
        + (f"\n\nCommit of the working folder: {_text(commit)}" if commit else ""),
        "## License\n\nNot stated: the licenses of the base model and of the data apply. "
        "Add `license:` above before you publish this.",
    ]
    return "\n\n".join(parts) + "\n"


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the recorded configuration; empty if it cannot be read."""
    try:
        loaded = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, Mapping) else {}


def _algorithm(config: Mapping[str, Any]) -> dict[str, str]:
    section = config.get("algorithm")
    found = section if isinstance(section, Mapping) else {}
    labels = {"name": "algorithm", "adv_estimator": "advantages"}
    return {label: str(found[key]) for key, label in labels.items() if found.get(key)}


def _front(
    run: Run, role: Role, kind: Kind, base: str, last: tuple[str, float] | None
) -> dict[str, Any]:
    """Return the metadata of the card, as the hub reads it."""
    task = f"text-{'generation' if role is ACTOR else 'classification'}"
    front: dict[str, Any] = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": task,
        "tags": ["rlctl", "reinforcement-learning"],
    }
    if _HUB_NAME.fullmatch(base) and not Path(base).exists():
        front["base_model"] = base
    if last is not None:
        metric, value = last
        parts = metric.split("/")  # val-core/SOURCE/acc/mean@1, val/loss
        source = _line("/".join(parts[1:-2]) or metric)
        short = "accuracy" if is_accuracy(metric) else _line(parts[-2:][len(parts) < 3])
        result = {
            "task": {"type": task},
            "dataset": {"name": source, "type": source},
            "metrics": [{"type": short, "name": _line(metric), "value": float(f"{value:.6g}")}],
        }
        front["model-index"] = [{"name": _line(run.name), "results": [result]}]
    return front


def _points(rows: Iterable[Mapping[str, float]], metric: str | None) -> list[tuple[int, float]]:
    """Return step and value of the finite values of a metric."""
    if metric is None:
        return []
    values = ((int(row["step"]), figure(row, (metric,))) for row in rows)
    return [(step, value) for step, value in values if value is not None]


def _last(rows: Iterable[Mapping[str, float]], metric: str | None) -> tuple[str, float] | None:
    points = _points(rows, metric)
    return (metric, points[-1][1]) if metric is not None and points else None


def _results(run: Run, rows: Sequence[Mapping[str, float]], metric: str | None) -> str:
    points = _points(rows, metric)
    if metric is None or not points:
        return "The run was not validated."
    summary = RunSummary.from_rows(run.history())
    figures = {
        "before training" if points[0][0] == 0 else f"step {points[0][0]}": points[0][1],
        f"this model (validated at step {points[-1][0]})": points[-1][1],
        f"best of the run (step {summary.best_step})": summary.best,
        "last of the run": summary.last,
    }
    return _table(
        (metric, "value"),
        ((name, percent_or_number(metric, value)) for name, value in figures.items()),
    )


def _curve(rows: Sequence[Mapping[str, float]], metric: str | None) -> list[str]:
    """Return a section with up to `MAX_POINTS` steps, those with a validation if there are any."""
    validated = [row for row in rows if metric is not None and metric in row]
    shown = validated or list(rows)
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
    return ["## Curve\n\n" + _table(("step", *names), lines)]


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

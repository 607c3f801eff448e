"""Content of a report as plain data: curves, alarms, samples and settings of its runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.data_prep.images import data_url
from rlctl.data_prep.thumbnails import read_thumbnail
from rlctl.episodes import Episode, ending, facts, speaker
from rlctl.files import by_step
from rlctl.plugins.console.report.curves import curves, short
from rlctl.plugins.console.report.seeds import seed_bands
from rlctl.recipes.layers import MISSING
from rlctl.runs.details import changed_settings, generation_steps
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.listing import overview
from rlctl.runs.run import Run
from rlctl.text import count, duration
from rlctl.tracking.jsonl import generations_file, read_generations
from rlctl.tracking.metric_table import MetricTable
from rlctl.tracking.run_summary import is_accuracy, percent_or_number
from rlctl.tracking.tracker import Sample

_HEAD_KEYS = ("actor_rollout_ref.model.path", "algorithm.name", "algorithm.adv_estimator")
MAX_VALIDATIONS = 12
MAX_NAMES = 4  # in a title
MAX_IMAGES = 8  # of a sample
# Events that are marked in the curves.
NOTABLE = ("resume", "checkpoint", "checkpoint_failed", "oom_retry", "skipped_update")


def content(
    runs: Sequence[Run],
    samples_per_step: int | None,
    search: Mapping[str, Any] | None = None,
    table_of: Callable[[Run], MetricTable] = Run.table,
) -> dict[str, Any]:
    """Return the content of the report; `search` is the result of `rlctl.sweeps.results.search`.

    `table_of` returns the metrics of a run. At most `MAX_VALIDATIONS` validations are included,
    each with `samples_per_step` samples of the same prompts, with None without samples.
    Raises ConfigError for damaged files.
    """
    labels = labels_of(runs)
    tables = [table_of(run) for run in runs]
    title = " · ".join(labels)
    if len(labels) > MAX_NAMES:
        title = f"{len(labels)} runs"
    if search:
        title = search["name"]
    return {
        "title": title,
        "project": ", ".join(sorted({run.project for run in runs})),
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "version": __version__,
        "runs": [
            _run(run, label, samples_per_step, table)
            for run, label, table in zip(runs, labels, tables, strict=True)
        ],
        "seeds": seed_bands(runs, labels, tables),
        "settings": settings(runs),
        "search": search,
    }


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, with their projects unless there is only one."""
    if len({run.project for run in runs}) > 1:
        return [run.key for run in runs]
    return [run.name for run in runs]


def _run(
    run: Run, label: str, samples_per_step: int | None, metrics: MetricTable
) -> dict[str, Any]:
    samples = [] if samples_per_step is None else _samples(run, samples_per_step)
    thumbnails = thumbnails_of(run, chain.from_iterable(step["shown"] for step in samples))
    return {
        "label": label,
        "key": run.key,
        **head(run),
        **setting_texts(run),
        "facts": _facts(run),
        **notable_events(run.path),
        "checkpoints": checkpoints(run.path),
        "steps": generation_steps(run.path),
        "samples": samples,
        "thumbnails": {digest: data_url(content) for digest, content in thumbnails.items()},
        **curves(metrics),
    }


def head(run: Run) -> dict[str, Any]:
    """Return what the head of a run's page shows and what changes during the run."""
    record = run.record
    return {
        "state": run.state,
        "failure": record.failure if record else {"message": run.problem},
        "exit_code": record and record.exit_code,
        "total_steps": record and record.total_steps,
        "tags": list(run.labels.tags),
        "note": run.labels.note,
        "summary": summary_texts(run),
        "tokens": (run.path / "tokens").is_dir(),
    }


def setting_texts(run: Run) -> dict[str, Any]:
    """Return model, algorithm and sweep of a run."""
    model, algorithm, estimator = map(run.setting, _HEAD_KEYS)
    if algorithm == "ppo" and estimator:
        algorithm = f"{algorithm} ({estimator})"
    return {"model": model, "algorithm": algorithm, "sweep": run.record and run.record.sweep}


def notable_events(folder: Path) -> dict[str, Any]:
    """Return the alarms of a run, and its events that concern a step (`NOTABLE`)."""
    events = read_events(folder)
    return {
        "alarms": alarms_of(events),
        "events": [
            {"step": event["step"], "kind": event["kind"], "time": event.get("time", "")}
            for event in events
            if event["kind"] in NOTABLE and isinstance(event.get("step"), int)
        ],
    }


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return step, size in bytes and path of each checkpoint of a run, oldest first."""
    return [
        {"step": step, "bytes": _num_bytes(path), "path": str(path.relative_to(folder))}
        for step, path in by_step(folder / "checkpoints").items()
    ]


def _num_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, from which another process may remove some."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            if file.is_file():
                total += file.stat().st_size
    return total


def summary_texts(run: Run) -> dict[str, str]:
    """Return the formatted figures of a run's card."""
    head = overview(run)
    metric = head["metric"]
    steps = f"{head['step'] or 0:,}"
    if head["total_steps"]:
        steps += f" of {head['total_steps']:,}"
    time = duration(run.seconds) if run.seconds is not None else "-"
    summary = {"steps": steps, "time": time, "tokens": count(head["tokens"])}
    if metric:
        summary["kind"] = "validation accuracy" if is_accuracy(metric) else metric
        for name in ("first", "last", "best"):
            summary[name] = percent_or_number(metric, head[name])
        summary["best"] = f"best {summary['best']} at step {head['best_step']}"
    return summary


def _facts(run: Run) -> dict[str, str]:
    record = run.record
    if record is None:
        return {"folder": str(run.path), "problem": run.problem or ""}
    git = record.git or {}
    state = "no git repository"
    if commit := git.get("commit"):
        state = commit[:12]
        if git.get("diff_sha256"):
            state += " with changes"
    facts = {
        "command": " ".join(record.command),
        "recipe": record.recipe,
        "made": f"{record.created} on {record.process.host}",
        "attempts": str(record.attempts),
        "exit code": "-" if record.exit_code is None else str(record.exit_code),
        "commit": state,
        "seeds": ", ".join(f"{name} {seed}" for name, seed in record.seeds.items()),
        "data": ", ".join(
            f"{name} (SHA-256 {digest[:12]})" for name, digest in record.data.items()
        ),
        "versions": ", ".join(
            f"{name} {number}" for name, number in record.versions.items() if number
        ),
        "folder": str(run.path),
    }
    return {name: value for name, value in facts.items() if value}


def _samples(run: Run, samples_per_step: int) -> list[dict[str, Any]]:
    """Return step, number of samples and the chosen samples of each validation shown."""
    steps = generation_steps(run.path)
    if len(steps) > MAX_VALIDATIONS:
        steps = [
            steps[round(index * (len(steps) - 1) / (MAX_VALIDATIONS - 1))]
            for index in range(MAX_VALIDATIONS)
        ]
    found: list[dict[str, Any]] = []
    for step in steps:
        samples = read_generations(generations_file(run.path, step))
        chosen = sorted(
            random.Random(0).sample(range(len(samples)), min(samples_per_step, len(samples)))
        )
        found.append(
            {
                "step": step,
                "total": len(samples),
                "shown": [plain_sample(index, samples[index]) for index in chosen],
            }
        )
    return found


def thumbnails_of(run: Run, samples: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the thumbnails of the images of `plain_sample`s, by digest."""
    digests = dict.fromkeys(digest for sample in samples for digest in sample["images"])
    return {
        digest: content
        for digest in digests
        if (content := read_thumbnail(run.path, digest)) is not None
    }


def plain_sample(index: int, sample: Sample) -> dict[str, Any]:
    return {
        "index": index,
        "prompt": sample.prompt.strip(),
        "response": "" if sample.episode else sample.response.strip(),
        "truth": str(sample.ground_truth),
        "score": short(sample.score),
        "right": sample.right,
        "verdict": sample.verdict,
        "components": {name: short(value) for name, value in sample.components.items()},
        "length": sample.length,
        "finish": sample.finish,
        "source": sample.data_source,
        "images": list(sample.images[:MAX_IMAGES]),
        "num_images": len(sample.images),
        "episode": sample.episode and _episode(sample.episode),
    }


def _episode(episode: Episode) -> dict[str, Any]:
    turns = [
        {
            "who": speaker(message),
            "facts": facts(message),
            "trained": message.trained,
            "text": message.text.strip(),
        }
        for message in episode.messages
    ]
    return {"turns": turns, "ending": ending(episode), "error": episode.error}


def settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the settings that any run changes from the base, sorted by key.

    Each has `key`, `base`, and `values` with `value` and `where` for each run.
    """
    changed = [changed_settings(run.path) for run in runs]
    bases: dict[str, Any] = {key: change["base"] for run in changed for key, change in run.items()}
    return [
        {
            "key": key,
            "base": _text(base),
            "values": [_setting(run.get(key), base) for run in changed],
        }
        for key, base in sorted(bases.items())
    ]


def _setting(given: Mapping[str, Any] | None, base: Any) -> dict[str, str]:
    if given is None:
        return {"value": _text(base), "where": ""}
    return {"value": _text(given["value"]), "where": _place(str(given["where"]))}


def _place(where: str) -> str:
    """Shorten a path to folder and file name: reports are shared."""
    if where.startswith(("/", "~")):
        return "/".join(where.rsplit("/", 2)[-2:])
    return where


def _text(value: Any) -> str:
    if value == MISSING:
        return "required"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

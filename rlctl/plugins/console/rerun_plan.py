"""New run from the record of another one: the same settings, data, model and code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, Problem
from rlctl.plugins.console.evidence import FOLDER
from rlctl.plugins.console.evidence_diff import Evidence, changed_files
from rlctl.recipes.compose import Recipe
from rlctl.runs.name_errors import free_name
from rlctl.runs.record import RunRecord
from rlctl.runs.run import Run
from rlctl.runs.trust import recompose_run
from rlctl.suggest import hydra_text, overridden_keys
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

# Metrics that depend on the clock or the machine; the settings and the seeds decide all others.
_OF_THE_CLOCK = ("timing_", "perf/", "async/", "system/")
_FEW = 6


def compose_again(run: Run, overrides: Sequence[str], name: str | None) -> Recipe:
    """Compose the settings of a run for a new one beside it, called `name` or `<run>-rerun`.

    A fork starts from the same checkpoint. Raises ConfigError for another's run that names code;
    see `runs.trust`.
    """
    record = run.readable_record()
    folder = run.path.absolute()
    settings = {
        "trainer.experiment_name": name or free_name(folder.with_name(f"{run.name}-rerun")),
        "trainer.run_dir": str(run.path.parent.parent),
        "trainer.project_name": run.project,
        "trainer.resume_mode": "disable",
    }
    if record.parent is not None:
        settings["trainer.resume_mode"] = "resume_path"
        settings["trainer.resume_from_path"] = str(record.parent["path"])
    given = overridden_keys(overrides)
    words = [hydra_text(key, value) for key, value in settings.items() if key not in given]
    recipe = recompose_run(run.path, [*words, *overrides])
    return dataclasses.replace(recipe, name=record.recipe)


def refuse_changes(run: Run, recipe: Recipe) -> None:
    """Raise ConfigError if data, model, code or environment variables are others than before."""
    from rlctl.runtime.data import bundled
    from rlctl.runtime.planning.model_paths import with_models
    from rlctl.runtime.training.drift import changed_environment
    from rlctl.runtime.training.input_hashes import input_hashes

    record = run.readable_record()
    with bundled.readable(with_models(recipe.config)) as config:
        inputs = input_hashes(config)
    changed = [
        str(Path(path).expanduser().resolve())
        for kind, hashes in inputs.items()
        for path, digest in hashes.items()
        if getattr(record, kind).get(path, digest) != digest
    ]
    changed = list(dict.fromkeys([*changed, *changed_files(run, recipe.recorded)]))
    messages = [f"{path} has changed since {run.name} started" for path in changed]
    messages += [str(change) for change in changed_environment(record, recipe)]
    if messages:
        hint = f"`rlctl show {run.name} --diff` prints the changes; --force trains with them"
        if (run.path / FOLDER).is_dir():
            hint += f"; {run.path / FOLDER} has copies of the code, which settings may name"
        problems = [Problem(message) for message in messages]
        raise ConfigError(*problems[:-1], Problem(messages[-1], hint=hint))


def notes(run: Run) -> list[str]:
    """Return what may make a difference, and cannot be refused: versions, commit, attempts."""
    before = Evidence.of(run)
    pairs = before.compared(Evidence.present(run))["environment"]
    shown = [f"{name} was {pair[0]} and is {pair[1]}" for name, pair in list(pairs.items())[:_FEW]]
    if len(pairs) > _FEW:
        shown.append(f"{len(pairs) - _FEW} more: `rlctl show {run.name} --diff` lists all")
    record: RunRecord = run.readable_record()
    if record.attempts > 1:
        shown.append(f"{run.name} has {record.attempts} attempts: the settings are its last ones")
    if record.cwd != str(Path.cwd()):
        shown.append(f"{run.name} was started in {record.cwd}; relative paths refer to this folder")
    return shown


def compare_metrics(before: Path, after: Path) -> dict[str, Any]:
    """Compare the metrics of two runs in the steps of both, but for those of the clock.

    Returns the number of `steps` and of `values` compared, and the first that `differ`.
    """
    one, other = (
        {row["step"]: row for row in read_metrics(run / METRICS_FILE)} for run in (before, after)
    )
    steps = sorted(one.keys() & other.keys())
    values = 0
    differ = list[dict[str, Any]]()
    for step in steps:
        for name in sorted(one[step].keys() | other[step].keys()):
            if name.startswith(_OF_THE_CLOCK) or name.endswith("/seconds"):
                continue
            pair = [one[step].get(name), other[step].get(name)]
            values += 1
            if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
                differ.append({"step": step, "metric": name, "values": pair})
    return {"steps": len(steps), "values": values, "differ": differ[:_FEW], "count": len(differ)}

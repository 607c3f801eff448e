"""Differences between a run and what a resumed one would use: settings, data, models, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import ConfigError, Problem
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.layers import leaves
from rlctl.recipes.recorded import environment_tags
from rlctl.recipes.recorded_config import Change, changes, edits
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import CONFIG_FILE
from rlctl.runtime.data import bundled
from rlctl.runtime.training.complete_checkpoints import config_hash
from rlctl.runtime.training.input_hashes import input_hashes

_NAMES = ("trainer.experiment_name", "trainer.project_name")


def changed_keys(
    run: Path, record: RunRecord, recipe: Recipe, checkpoint: Path | None
) -> list[Change]:
    """Return what differs from the configuration with which the run was started.

    These are keys of `recipe`, values that it reads from the environment, and edits of the run's
    `config.yaml`. Raises `ConfigError` for an edited file without a checkpoint to compare it with.
    """
    found = [
        *changes(run, recipe.recorded),
        *changed_environment(record, recipe),
        *_edited(run, record, checkpoint),
    ]
    return list({change.key: change for change in reversed(found)}.values())[::-1]


def refuse_drift(run: Path, differing: Sequence[Change], files: Sequence[str], force: bool) -> None:
    """Raise `ConfigError` for config or files that changed, unless the change is harmless.

    With `force` only for another name, which the folder of the run would not have.
    """
    hint = f"`rlctl resume {run.name} … --fork NAME` starts a new run from this state"
    if not force:
        hint += "; --force continues this one with the changes"
    drift = [
        f"{change} would change the run {run.name!r}"
        for change in differing
        if not change.free and (change.key in _NAMES or not force)
    ]
    if not force:
        drift += files
    problems = [Problem(message) for message in drift]
    if problems:
        raise ConfigError(*problems[:-1], Problem(problems[-1].message, hint=hint))


def changed_files(record: RunRecord, config: schema.Config) -> list[str]:
    """Return a message for each file of data, model or reward code that changed since the start.

    A file under another path is unchanged if it equals any of the run's files. Fields that the
    record of an earlier version of rlctl does not have are not compared.
    """
    before = {**record.data, **record.reward_code, **record.models}
    with bundled.readable(config) as existing:
        inputs = input_hashes(existing)
    changed = [
        path
        for field, hashes in inputs.items()
        if getattr(record, field)
        for path, digest in hashes.items()
        if digest not in ([before[path]] if path in before else before.values())
    ]
    return [f"{path} has changed since the run started" for path in changed]


def changed_environment(record: RunRecord, recipe: Recipe) -> list[Change]:
    """Return a change for each key that reads another value from the environment than before."""
    tags = environment_tags(recipe.container, recipe.recorded, record.id)
    text = leaves(recipe.recorded)
    return [
        Change(key, text[key], f"{text[key]} with another value")
        for key, tag in tags.items()
        if record.environment.get(key, tag) != tag
    ]


def _edited(run: Path, record: RunRecord, checkpoint: Path | None) -> list[Change]:
    """Return the changes to the run's `config.yaml` since rlctl wrote it.

    The record and the checkpoint's manifest have its hash, and the checkpoint a copy. Raises
    `ConfigError` for an edited file if there is no copy to compare it with.
    """
    found = config_hash(run)
    if record.config_sha256 in (None, found):
        return []
    if checkpoint is None:
        raise ConfigError(
            "the configuration was edited after the start, and no checkpoint has a copy of it",
            where=str(run / CONFIG_FILE),
            hint="pass changes as overrides of `rlctl resume`, after undoing the edit",
        )
    return [] if found == config_hash(checkpoint) else edits(run, checkpoint)

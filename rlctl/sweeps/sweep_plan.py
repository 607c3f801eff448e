"""Checks of a sweep before it starts: axes, values, data, model, and the resources of each run."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import ConfigError, Problem, RlctlError, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.axes import (
    Axis,
    axes_of,
    check_fixed,
    check_repeated,
    split_axes,
    with_first_values,
)
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.layers import leaves
from rlctl.recipes.unused_keys import report_unused_keys
from rlctl.redaction import SECRET
from rlctl.runs.naming import check_free
from rlctl.runtime.planning.early_checks import check_early
from rlctl.sweeps.study import check_axes, num_trials, points

if TYPE_CHECKING:
    from rlctl.runtime.planning.plan import Plan

_log = logging.getLogger(__name__)

_MAX_CHECKED_POINTS = 32
_VALIDATION = ("val-core/", "val-aux/")


@dataclass(frozen=True)
class SweepPlan:
    """Sweep that passed all checks; nothing is written yet.

    `recipe` is composed with the first value of every axis. `needs` pairs overrides with the
    resources of a run: one pair per trial of a small grid, otherwise one per value of each axis.
    """

    verb: str
    source: str
    fixed: Sequence[str]
    axes: Sequence[Axis]
    recipe: Recipe
    total_steps: int
    needs: Sequence[tuple[Sequence[str], Mapping[str, float]]]

    @property
    def settings(self) -> schema.Sweep:
        """Section `sweep` of the recipe."""
        return self.recipe.config.sweep

    @property
    def num_runs(self) -> int:
        """Number of trials times the number of seeds."""
        return num_trials(self.axes, self.settings) * self.settings.seeds


def make_sweep_plan(verb: str, source: str, overrides: Sequence[str]) -> SweepPlan:
    """Plan a sweep: check all axes, the first trial as a run, and what other values change.

    Starts no process that stays and writes nothing. Raises all problems of a stage at once; a stage
    that needs no torch is first.
    """
    check_repeated(overrides)
    fixed, axes = split_axes(overrides, source)
    base = compose(source, with_first_values(fixed, axes))
    given = {axis.key for axis in axes}
    more = [axis for axis in axes_of(base.config.sweep.params, source) if axis.key not in given]
    check_fixed(fixed, more)
    axes = more + axes
    settings = base.config.sweep
    check_axes(axes, settings)
    recipe = compose(source, with_first_values(fixed, axes))
    raise_problems(_literal_secrets(recipe))
    check_early(recipe)
    trainer = recipe.config.trainer
    check_free(Path(trainer.run_dir), trainer.project_name, trainer.experiment_name)
    if trainer.test_freq < 1 and not trainer.val_only:
        raise ConfigError(
            "trials would never run validation, so they have no value to compare",
            where=f"trainer.test_freq={trainer.test_freq}",
            hint="set trainer.test_freq=N",
        )
    trials = _compose_trials(source, fixed, axes, settings)
    from rlctl.runtime.planning.plan import make_plan
    from rlctl.runtime.planning.run_resources import run_resources
    from rlctl.runtime.planning.variants import Variants, each_message_once

    with each_message_once():
        plan = make_plan(recipe, inline=False)
        for line in report_unused_keys(recipe, plan.roles, strict=False):
            _log.warning(line)
        _check_metric(settings.metric, plan)
        variants = Variants(plan)
        problems: dict[str, Problem] = {}
        needs: list[tuple[Sequence[str], Mapping[str, float]]] = []
        for overrides, trial in trials.items():
            with _named_by(overrides, problems):
                needs.append((overrides, run_resources(trial.config)))
                variants.check(trial)
        raise_problems(problems.values())
    return SweepPlan(verb, source, fixed, axes, recipe, plan.num_steps, needs)


def _check_metric(metric: str | None, plan: Plan) -> None:
    """Raise ConfigError for an objective that no trial can log: a name without group or source.

    Names below a data source depend on the reward function, and are checked by the first trial.
    """
    if metric is None or ("/" in metric and not metric.startswith(_VALIDATION)):
        return
    sources: Iterable[str] = ()
    if plan.validator:
        sources = plan.validator.prompts.rows.count_sources()
    if any(metric.startswith(f"{group}{source}/") for group in _VALIDATION for source in sources):
        return
    names = [f"val-core/{source}/acc/mean@1" for source in sources]
    raise ConfigError(
        f"no trial would log the metric {metric!r}",
        where="sweep.metric",
        hint=f"a metric of metrics.jsonl, such as {' or '.join(names or ['val/loss'])}",
    )


def _literal_secrets(recipe: Recipe) -> list[Problem]:
    """Return a problem for each literal secret: trials that resume would need it again."""
    return [
        Problem(
            f"{key} is a literal secret, which a sweep cannot store",
            recipe.origins[key][-1].where if key in recipe.origins else None,
            f"{key}='${{oc.env:NAME}}' reads it from the environment",
        )
        for key, value in leaves(recipe.recorded).items()
        if SECRET in str(value)
    ]


def config_digest(recipe: Recipe) -> str:
    """Return the SHA-256 of the config that all trials share, without how they are scheduled."""
    container = {
        name: section
        for name, section in recipe.recorded.items()
        if name not in ("sweep", "ray_kwargs")
    }
    return hashlib.sha256(json.dumps(container, sort_keys=True, default=str).encode()).hexdigest()


def _compose_trials(
    source: str, fixed: Sequence[str], axes: Sequence[Axis], settings: schema.Sweep
) -> dict[tuple[str, ...], Recipe]:
    """Compose the configs of trials by their overrides, and run the early checks of each.

    They are each point of a small grid; otherwise each value of each axis, with the first values of
    the other axes. A problem of several trials is reported for the first of them.
    """
    grid = points(axes, settings)
    if grid is None or len(grid) > _MAX_CHECKED_POINTS:
        first = {axis.key: axis.first for axis in axes}
        grid = [
            {**first, axis.key: value} for axis in axes for value in (axis.values or axis.bounds)
        ]
    trials: dict[tuple[str, ...], Recipe] = {}
    problems: dict[str, Problem] = {}
    for point in grid:
        trial = tuple(f"{key}={value}" for key, value in point.items())
        with _named_by(trial, problems):
            trials[trial] = compose(source, [*fixed, *trial])
            check_early(trials[trial])
    raise_problems(problems.values())
    return trials


@contextmanager
def _named_by(overrides: tuple[str, ...], problems: dict[str, Problem]) -> Iterator[None]:
    """Add the problems of a trial that are raised in the block."""
    try:
        yield
    except RlctlError as error:
        for problem in error.problems:
            where = f"trial {shlex.join(overrides)}: {problem.where or ''}".rstrip(": ")
            problems.setdefault(problem.message, Problem(problem.message, where, problem.hint))

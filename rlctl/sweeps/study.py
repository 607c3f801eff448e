"""Optuna study on disk: selects the next values and prunes trials. It and `draws` use Optuna.

Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", arXiv:1907.10902.
Every draw is a function of the sampler's seed, the trial's number and the earlier trials, so an
interrupted study continues with the same draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes.axes import Axis
from rlctl.recipes.schema import Sweep
from rlctl.sweeps.sweep_record import Outcome, Trial

_SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    # All points of a grid are enqueued, so its sampler draws nothing.
    "grid": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
}
_PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "none": lambda _: optuna.pruners.NopPruner(),
    "median": lambda _: optuna.pruners.MedianPruner(n_startup_trials=3),
    "hyperband": lambda steps: optuna.pruners.HyperbandPruner(max_resource=steps),
}


_NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.run_dir")
_REASON = "reason"
_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class Study:
    """Trials of one sweep; a study opened from the same file continues."""

    def __init__(
        self, storage: Path, axes: Sequence[Axis], settings: Sweep, total_steps: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.axes = axes
        self.settings = settings
        self._space = {axis.key: _distribution(axis, settings.sampler) for axis in axes}
        direction = "minimize"
        if settings.mode == "max":
            direction = "maximize"
        self._study = optuna.create_study(
            storage=f"sqlite:///{storage.absolute()}",
            study_name="sweep",  # the same for all sweeps: Hyperband's brackets depend on it
            direction=direction,
            pruner=_PRUNERS[settings.pruner](total_steps),
            load_if_exists=True,
        )
        for point in points(axes, settings) or ():
            self._study.enqueue_trial(point, skip_if_exists=True)

    @property
    def num_trials(self) -> int:
        """Total number of trials of the sweep."""
        return num_trials(self.axes, self.settings)

    def ask(self) -> Trial | None:
        """Return the next trial to run, None when all have started."""
        from rlctl.sweeps.draws import draw

        trials = self._study.get_trials(deepcopy=False)
        number = sum(trial.state != TrialState.WAITING for trial in trials)
        if number >= self.num_trials:
            return None
        # A new sampler per draw: the draw must not depend on earlier draws of this process.
        self._study.sampler = _SAMPLERS[self.settings.sampler](self.settings.seed + number)
        if number == len(trials):
            self._study.enqueue_trial(draw(self._study, self._space))
        return self._trial(self._frozen(self._study.ask(self._space).number))

    def running(self) -> list[Trial]:
        """Return the trials that have started and not ended, in this process or an earlier one."""
        found: list[Trial] = []
        for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if set(_params(trial)) >= set(self._space):
                found.append(self._trial(trial))
            else:  # a process of an earlier version was killed while it drew the values
                self._study.tell(trial.number, state=TrialState.FAIL)
        return found

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Report the value of a trial after the validation of a step; ignore repeated steps."""
        open_trial = self._open(trial)
        if math.isfinite(value) and step not in self._frozen(trial.number).intermediate_values:
            open_trial.report(value, step)

    def should_prune(self, trial: Trial) -> bool:
        """Return True if the pruner would stop the trial now."""
        return self._open(trial).should_prune()

    def tell(self, trial: Trial, state: str, value: float | None = None, reason: str = "") -> None:
        """Record the end of a trial: `finished` with its value, `pruned` or `failed`."""
        if reason:
            self._open(trial).set_user_attr(_REASON, reason)
        states = {name: state for state, name in _STATES.items()}
        if state != "finished":
            value = None
        self._study.tell(trial.number, values=value, state=states[state])

    def outcomes(self) -> list[Outcome]:
        """Return the state of every trial so far, by number."""
        return [
            Outcome(
                self._trial(trial),
                _STATES[trial.state],
                trial.value,
                trial.intermediate_values,
                trial.user_attrs.get(_REASON, ""),
            )
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def importances(self) -> dict[str, float]:
        """Return the importance of each axis for the best quarter of the trials; they sum to 1.

        Uses PED-ANOVA (arXiv:2304.10255). The best tenth, Optuna's default, would be too few trials
        in a small sweep. Empty for a single axis, and until two finished trials differ.
        """
        finished = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if len({trial.value for trial in finished}) < 2 or len(self.axes) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(
            target_quantile=0.25, evaluate_on_local=True
        )
        return optuna.importance.get_param_importances(self._study, evaluator=evaluator)

    def _open(self, trial: Trial) -> optuna.Trial:
        return optuna.Trial(self._study, self._frozen(trial.number)._trial_id)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _trial(self, trial: FrozenTrial) -> Trial:
        params = _params(trial)
        return Trial(
            trial.number,
            [f"{axis.key}={params[axis.key]}" for axis in self.axes if axis.key in params],
        )


def _params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the values of a trial; an enqueued point of a grid has fixed ones."""
    return trial.system_attrs.get("fixed_params", {}) | trial.params


def points(axes: Sequence[Axis], settings: Sweep) -> list[dict[str, Any]] | None:
    """Return the points of a grid, the last axis changing fastest; None for other samplers.

    Returns at most `settings.trials` points. Raises ConfigError if an axis is an interval.
    """
    if settings.sampler != "grid":
        return None
    hint = "list its values or give a range(…), or sample from it: --sampler random --trials N"
    endless = [
        Problem(f"a grid needs values, but {axis.key} is an interval", axis.text, hint)
        for axis in axes
        if not axis.values
    ]
    raise_problems(endless)
    grid = (
        dict(zip((axis.key for axis in axes), values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    )
    return list(itertools.islice(grid, settings.trials))


def num_trials(axes: Sequence[Axis], settings: Sweep) -> int:
    """Return the number of trials; raise ConfigError if a sampler needs it and it is not set."""
    grid = points(axes, settings)
    if grid is not None:
        return len(grid)
    if settings.trials is None:
        raise ConfigError(
            f"--sampler {settings.sampler} needs the number of trials",
            where="sweep.trials",
            hint="add --trials N",
        )
    return settings.trials


def check_axes(axes: Sequence[Axis], settings: Sweep) -> None:
    """Raise ConfigError if there are no axes, or the sampler cannot search them."""
    if not axes:
        hint = (
            "give several values, such as actor_rollout_ref.actor.optim.lr=1e-6,1e-5, "
            "or a section sweep.params in the recipe"
        )
        raise ConfigError("there is nothing to search: every key has one value", hint=hint)
    num_trials(axes, settings)
    fixed: dict[str, str] = dict.fromkeys(_NAMES, "the sweep names its runs")
    if settings.seeds > 1:
        fixed["trainer.seed"] = f"--seeds {settings.seeds} sets it"
    raise_problems(
        [
            Problem(f"{axis.key} cannot be searched: {fixed[axis.key]}", axis.text)
            for axis in axes
            if axis.key in fixed
        ]
    )
    if settings.sampler == "cmaes":
        hint = "use an interval(…) or a range(…) of numbers, or --sampler tpe"
        raise_problems(
            [
                Problem(f"CMA-ES searches numbers; {axis.key} is a choice", axis.text, hint)
                for axis in axes
                if not axis.interval
            ]
        )


def _distribution(axis: Axis, sampler: str) -> BaseDistribution:
    if axis.interval is None or sampler == "grid":
        return CategoricalDistribution(axis.values)
    interval = axis.interval
    if interval.whole:
        return IntDistribution(
            int(interval.low), int(interval.high), log=interval.log, step=int(interval.step or 1)
        )
    step = None
    if interval.step is not None:
        step = float(interval.step)
    return FloatDistribution(float(interval.low), float(interval.high), log=interval.log, step=step)

"""The study: which values are tried next and which trials stop early, kept on disk. The one file that knows Optuna.

Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", arXiv:1907.10902. Every draw is a function of the
sampler's seed, the number of the trial and the trials before it, so a study that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

_SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "grid": lambda seed: optuna.samplers.RandomSampler(
        seed=seed
    ),  # the points are enqueued beforehand; nothing is drawn
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
}
_PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "none": lambda _: optuna.pruners.NopPruner(),
    "median": lambda _: optuna.pruners.MedianPruner(n_startup_trials=3),
    "hyperband": lambda steps: optuna.pruners.HyperbandPruner(max_resource=steps),
}


@dataclass(frozen=True)
class Trial:
    """One choice of values. `overrides` set them."""

    number: int
    overrides: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """How a trial stands: `values` by step as reported, `state` waiting, running, finished, pruned or failed."""

    trial: Trial
    state: str
    value: float | None
    values: Mapping[int, float]


_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class Study:
    """The trials of one sweep. Made anew from the same file, it goes on where it was."""

    def __init__(
        self, storage: Path, axes: Sequence[Axis], settings: Sweep, total_steps: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.axes, self.settings = axes, settings
        self._space = {axis.key: _distribution(axis, settings.sampler) for axis in axes}
        self._study = optuna.create_study(
            storage=f"sqlite:///{storage.absolute()}",
            study_name=storage.parent.name,
            direction="maximize" if settings.mode == "max" else "minimize",
            pruner=_PRUNERS[settings.pruner](total_steps),
            load_if_exists=True,
        )
        for point in points(axes, settings) or ():
            self._study.enqueue_trial(point, skip_if_exists=True)

    @property
    def num_trials(self) -> int:
        return num_trials(self.axes, self.settings)

    def ask(self) -> Trial | None:
        """The next trial to run, or None when all have been given out."""
        trials = self._study.get_trials(deepcopy=False)
        if sum(trial.state != TrialState.WAITING for trial in trials) >= self.num_trials:
            return None
        # A sampler of its own for every draw: what is drawn depends on the number of the trial, not on what this process drew before.
        self._study.sampler = _SAMPLERS[self.settings.sampler](self.settings.seed + len(trials))
        return self._trial(self._frozen(self._study.ask(self._space).number))

    def running(self) -> list[Trial]:
        """Trials that were given out and never judged, by this process or by one that died."""
        found: list[Trial] = []
        for each in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if set(_params(each)) >= set(self._space):
                found.append(self._trial(each))
            else:  # the process died while its values were drawn
                self._study.tell(each.number, state=TrialState.FAIL)
        return found

    def report(self, trial: Trial, step: int, value: float) -> None:
        """The value of a trial after the validation of a step. A step is told once."""
        open_trial = self._open(trial)
        if math.isfinite(value) and step not in self._frozen(trial.number).intermediate_values:
            open_trial.report(value, step)

    def should_prune(self, trial: Trial) -> bool:
        return self._open(trial).should_prune()

    def tell(self, trial: Trial, state: str, value: float | None = None) -> None:
        """The end of a trial: `finished` with its value, `pruned`, or `failed`."""
        states = {name: each for each, name in _STATES.items()}
        self._study.tell(
            trial.number, values=value if state == "finished" else None, state=states[state]
        )

    def outcomes(self) -> list[Outcome]:
        """Every trial so far, in order."""
        return [
            Outcome(self._trial(each), _STATES[each.state], each.value, each.intermediate_values)
            for each in self._study.get_trials(deepcopy=False)
        ]

    def importances(self) -> dict[str, float]:
        """How much each axis tells the best quarter of the trials from the rest (PED-ANOVA, arXiv:2304.10255), as shares of 1.

        Empty for a single axis, and until two finished trials differ. A tenth, Optuna's default, is two trials of a sweep of twenty.
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
    """The values of a trial; a point of a grid has them before it is given out."""
    return trial.system_attrs.get("fixed_params", {}) | trial.params


def points(axes: Sequence[Axis], settings: Sweep) -> list[dict[str, Any]] | None:
    """All combinations of the axes' values in order, the last axis changing first, at most `settings.trials`; None where nothing is a grid.

    Raises ConfigError when a grid should be made of an interval.
    """
    if settings.sampler != "grid":
        return None
    hint = "name its values, as a range(…) or a list, or draw from it: --sampler random --trials N"
    endless = [
        Problem(f"{axis.key} ranges over an interval, which has no end of values", axis.text, hint)
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
    """How many trials there will be. Raises ConfigError when nobody said so."""
    grid = points(axes, settings)
    if grid is not None:
        return len(grid)
    if settings.trials is None:
        raise ConfigError(
            f"--sampler {settings.sampler} draws for as long as it is asked",
            where="sweep.trials",
            hint="--trials N",
        )
    return settings.trials


def check_axes(axes: Sequence[Axis], settings: Sweep) -> None:
    """Raises ConfigError when the sampler cannot search these axes, or there is nothing to search."""
    if not axes:
        hint = "name several values: actor_rollout_ref.actor.optim.lr=1e-6,1e-5, or a section sweep.params in the recipe"
        raise ConfigError("there is nothing to search: every key has one value", hint=hint)
    num_trials(axes, settings)
    if settings.sampler == "cmaes":
        hint = "an interval(…) or a range(…) of numbers, or --sampler tpe"
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
    step = None if interval.step is None else float(interval.step)
    return FloatDistribution(float(interval.low), float(interval.high), log=interval.log, step=step)

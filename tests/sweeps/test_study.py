"""Axes of sweeps, and the study with real Optuna: draws, pruning, and resumption from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.recipes.axes import Interval, axes_of, split_axes
from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Sweep
from rlctl.sweeps.plan import make_sweep_plan
from rlctl.sweeps.study import Study, check_axes


def settings(**changes: Any) -> Sweep:
    return compose("ppo").config.sweep.model_copy(update=changes)


def study(folder: Path, overrides: list[str], steps: int = 9, **changes: Any) -> Study:
    _, axes = split_axes(overrides, "ppo")
    return Study(folder / "study.db", axes, settings(**changes), steps)


def test_grid_yields_all_points_in_order(tmp_path: Path) -> None:
    made = study(tmp_path, ["a=1,2", "b=range(0,2)"])
    asked = [trial.overrides for trial in iter(made.ask, None)]
    assert asked == [["a=1", "b=0"], ["a=1", "b=1"], ["a=2", "b=0"], ["a=2", "b=1"]]
    assert made.num_trials == 4
    assert study(tmp_path / "", ["a=1,2", "b=range(0,2)"]).ask() is None, (
        "the points of a grid are enqueued once"
    )


@pytest.mark.parametrize(
    ("sampler", "trials"),
    [("random", 3), pytest.param("tpe", 12, marks=pytest.mark.soak), ("cmaes", 5)],
)
def test_interrupted_study_draws_the_same_values(sampler: str, trials: int, tmp_path: Path) -> None:
    """TPE draws its first ten trials at random."""
    axes = ["lr=tag(log,interval(1e-6,1e-3))", "n=range(2,9,2)"]

    def draw(folder: Path, reopen: bool) -> list[object]:
        folder.mkdir()
        made, drawn = study(folder, axes, sampler=sampler, trials=trials), []
        for _ in range(trials):
            if reopen:
                made = study(folder, axes, sampler=sampler, trials=trials)
            trial = made.ask()
            assert trial is not None
            lr = float(trial.overrides[0].partition("=")[2])
            assert 1e-6 <= lr <= 1e-3
            assert trial.overrides[1] in ("n=2", "n=4", "n=6", "n=8")
            made.tell(trial, "finished", -abs(lr - 1e-4))
            drawn.append(trial.overrides)
        assert made.ask() is None
        return drawn

    assert draw(tmp_path / "once", reopen=False) == draw(tmp_path / "again", reopen=True)


def test_hyperband_prunes_the_worse_trials(tmp_path: Path) -> None:
    made = study(tmp_path, ["a=range(0,9)"], pruner="hyperband")
    states = {}
    for trial in iter(made.ask, None):
        quality = -float(trial.overrides[0].partition("=")[2])  # each is worse than the one before
        for step in range(1, 10):
            made.report(trial, step, quality * step)
            if made.should_prune(trial):
                made.tell(trial, "pruned")
                break
        else:
            made.tell(trial, "finished", quality)
        states[trial.number] = made.outcomes()[trial.number].state
    assert states[0] == "finished"
    assert list(states.values()).count("pruned") >= 4


def test_reopened_study_finds_open_trials(tmp_path: Path) -> None:
    first = study(tmp_path, ["a=1,2,3"])
    done, lost = first.ask(), first.ask()
    assert done is not None
    assert lost is not None
    first.tell(done, "finished", 0.5)
    first.report(lost, 3, 0.25)
    again = study(tmp_path, ["a=1,2,3"])
    assert again.running() == [lost]
    again.report(lost, 3, 0.25)  # reported twice, kept once
    again.report(lost, 6, 0.75)
    again.tell(lost, "finished", 0.75)
    assert [outcome.state for outcome in again.outcomes()] == ["finished", "finished", "waiting"]
    assert dict(again.outcomes()[1].values) == {3: 0.25, 6: 0.75}


def test_importances_find_the_relevant_axis(tmp_path: Path) -> None:
    made = study(tmp_path, ["a=range(0,4)", "b=range(0,4)"])
    for trial in iter(made.ask, None):
        made.tell(trial, "finished", float(trial.overrides[0].partition("=")[2]))
    found = made.importances()
    assert found["a"] > 0.9 > 0.1 > found["b"]


def test_invalid_axes_are_rejected() -> None:
    _, numbers = split_axes(["a=interval(0,1)"], "ppo")
    _, choices = split_axes(["a=x,y"], "ppo")
    _, seeds = split_axes(["trainer.seed=1,2"], "ppo")
    _, names = split_axes(["trainer.experiment_name=x,y"], "ppo")
    check_axes(seeds, settings())
    for axes, changes, message in (
        ([], {}, "nothing to search"),
        (numbers, {}, "is an interval"),
        (numbers, {"sampler": "tpe"}, "needs the number of trials"),
        (choices, {"sampler": "cmaes", "trials": 3}, "searches numbers"),
        (seeds, {"seeds": 2}, "cannot be searched: --seeds 2 sets it"),
        (names, {}, "cannot be searched: the sweep names its runs"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_axes(axes, settings(**changes))


def test_sweep_over_a_required_key_that_nothing_else_sets() -> None:
    fixed = ["data.train_files=quickstart", "data.val_files=quickstart", "trainer.test_freq=1"]
    fixed += ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    axis = "actor_rollout_ref.model.path=quickstart,other"
    plan = make_sweep_plan("grpo", "grpo_trainer", [*fixed, "data.max_prompt_length=64", axis])
    assert plan.num_runs == 2


def test_split_separates_axes_from_single_values() -> None:
    fixed, axes = split_axes(
        ["trainer.seed=5", "a.b=1e-6,1e-5", "x=[1,2]", "y='a,b'", "broken=("], "ppo"
    )
    assert fixed == ["trainer.seed=5", "x=[1,2]", "y='a,b'", "broken=("]
    assert [(axis.key, axis.values) for axis in axes] == [("a.b", ("1e-06", "1e-05"))]


@pytest.mark.parametrize(
    ("text", "values", "interval"),
    [
        ("a=choice(x,y)", ("x", "y"), None),
        ("a=[1,2],[3]", ("[1,2]", "[3]"), None),
        ("a=range(1,8,3)", ("1", "4", "7"), Interval(1, 7, False, 3)),
        ("a=interval(0,2)", (), Interval(0.0, 2.0, False)),
        ("a=int(interval(1,10))", (), Interval(1, 10, False)),
        ("a=tag(log,interval(1e-4,1))", (), Interval(1e-4, 1.0, True)),
        ("optim@critic.optim=glob(*)", ("adamw",), None),
        ("optim@critic.optim=glob(*,exclude=b*)", ("adamw",), None),
    ],
)
def test_grammar(text: str, values: tuple[str, ...], interval: Interval | None) -> None:
    _, (axis,) = split_axes([text], "ppo")
    assert (axis.values, axis.interval) == (values, interval)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=interval(1,0)", "smaller to a larger"),
        ("a=tag(log,interval(0,1))", "logarithmic"),
        ("a=shuffle(range(1,4))", "no seed"),
        ("optim@critic.optim=glob(z*)", "no values"),
    ],
)
def test_invalid_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_axes([text], "ppo")


def test_axes_of_sweep_params() -> None:
    axes = axes_of({"a.b": [0.5, None, True, [1, 2]], "c": "tag(log,interval(1e-7,1e-5))"}, "ppo")
    assert axes[0].values == ("0.5", "null", "True", "[1,2]")
    assert axes[1].interval == Interval(1e-7, 1e-5, True)
    with pytest.raises(ConfigError, match="is not an axis"):
        axes_of({"a.b": 3}, "ppo")

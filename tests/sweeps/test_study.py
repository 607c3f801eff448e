"""Axes of sweeps, and the study with real Optuna: draws, pruning, and resumption from disk."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes.axes import Interval, axes_of, split_axes
from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Sweep
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.planning import draft
from rlctl.sweeps.study import Study, check_axes
from rlctl.sweeps.sweep_plan import make_sweep_plan


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed process is a fork")
@pytest.mark.parametrize(
    "sampler",
    ["random", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tpe", "cmaes"))],
)
def test_a_draw_that_was_killed_is_made_again(sampler: str, tmp_path: Path) -> None:
    """Kill a process at each of its writes of the second trial."""
    axes = ["lr=interval(1e-6,1e-3)", "n=range(2,9,2)"]

    def opened(folder: Path) -> Study:
        return study(folder, axes, sampler=sampler, trials=2)

    def finish(folder: Path) -> list[list[str]]:
        again = opened(folder)
        for trial in again.running():
            again.tell(trial, "finished", 1.0)
        while trial := again.ask():
            again.tell(trial, "finished", 1.0)
        return [outcome.trial.overrides for outcome in again.outcomes()]

    def ask_until(write: int, folder: Path) -> int:
        """Return the exit status of a process that ends at a write of its draw, 0 if before."""
        process = os.fork()
        if process:
            return os.waitpid(process, 0)[1]
        with suppress(BaseException):
            begun, writes = opened(folder), itertools.count(1)
            event.listen(Engine, "commit", lambda _: next(writes) == write and os._exit(1))
            begun.ask()
        os._exit(0)

    first = tmp_path / "first"
    first.mkdir()
    begun = opened(first)
    trial = begun.ask()
    assert trial is not None
    begun.tell(trial, "finished", 1.0)
    expected = finish(shutil.copytree(first, tmp_path / "once"))
    for write in itertools.count(1):
        folder = shutil.copytree(first, tmp_path / str(write))
        if ask_until(write, folder) == 0:
            break
        assert finish(folder) == expected, write
    assert write > 4


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
    axis = f"actor_rollout_ref.model.path=quickstart,{real_path('quickstart')}"
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


LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{LR}=1e-4,2e-4", f"{LR}=3e-4,4e-4"], "another axis"),
        ([f"{LR}=1e-4,2e-4", f"{LR}=5e-4"], "one value"),
        ([f"{LR}=1e-4,2e-4", f"++{LR}=5e-4"], "one value"),
        # verl's name, and a section with the key.
        pytest.param(
            ["actor_rollout_ref.actor.optim.clip_grad=1,2", "actor_rollout_ref.actor.grad_clip=1"],
            "one value",
            marks=pytest.mark.plugin("bridges"),
        ),
        ([f"{LR}=1e-4,2e-4", "actor_rollout_ref.actor.optim={lr:1}"], "one value"),
    ],
)
def test_an_axis_that_is_given_again_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        make_sweep_plan("ppo", "ppo", overrides)
    [problem] = caught.value.problems
    assert all(text in problem.message for text in overrides)


def test_an_axis_replaces_a_value_before_it() -> None:
    plan = make_sweep_plan("ppo", "ppo", [f"{LR}=5e-4", f"{LR}=1e-4,2e-4"])
    assert [need for need, _ in plan.needs] == [(f"{LR}=0.0001",), (f"{LR}=0.0002",)]


def test_one_value_for_an_axis_of_the_recipe_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"defaults: [ppo, _self_]\nsweep: {{params: {{{LR}: [1e-4, 3e-4]}}}}\n")
    with pytest.raises(ConfigError, match=r"sweep\.params searches") as caught:
        make_sweep_plan("ppo", str(recipe), [f"{LR}=5e-4"])
    assert f"{LR}=5e-4" in caught.value.problems[0].message
    plan = make_sweep_plan("ppo", str(recipe), [f"{LR}=1e-5,2e-5,3e-5"])
    assert plan.num_runs == 3


@pytest.mark.parametrize(
    ("overrides", "message", "where"),
    [
        (["data.train_files=quickstart,missing.parquet"], "does not exist", "missing.parquet"),
        (["data.val_files=quickstart,missing.parquet"], "does not exist", "missing.parquet"),
        (["data.train_batch_size=128,4224"], "4096 training prompts do not fill", "4224"),
        (["data.train_batch_size=128,100"], "does not divide", "100"),
        (["actor_rollout_ref.model.path=quickstart,./nowhere"], "nowhere", "path"),
        (["actor_rollout_ref.rollout.temperature=1.0,-1"], "number > 0", "temperature=-1"),
        (["data.max_prompt_length=64,2"], "no prompt is left", "max_prompt_length=2"),
        (["reward.functions=[gsm8k],[nothing]"], "nothing", "reward.functions"),
    ],
)
def test_every_value_is_checked_like_the_first(
    overrides: list[str], message: str, where: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_sweep_plan("ppo", "ppo", overrides)
    assert where in f"{caught.value.problems[0]}"
    assert caught.value.problems[0].where is not None
    assert caught.value.problems[0].where.startswith("trial ")


def test_values_share_data_models_and_the_trial_of_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(PromptSet, "load_train", _counted(PromptSet.load_train, read))
    monkeypatch.setattr(draft, "check_reward", _counted(draft.check_reward, read))
    values = ",".join(f"{number}e-6" for number in range(1, 11))
    plan = make_sweep_plan("ppo", "ppo", [f"{LR}={values}"])
    assert len(plan.needs) == 10
    assert len(read) == 2


def _counted(call: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(call)
        return call(*args, **kwargs)

    return counted

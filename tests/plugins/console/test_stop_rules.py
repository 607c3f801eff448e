"""Rules that end a run: their values, their errors, and their independence of interruptions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.api import compose
from rlctl.errors import ConfigError
from rlctl.plugins.console.stop_rules import KEY, StopRules
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from tests.e2e.command import metrics, reproducible, rlctl
from tests.e2e.conftest import small, write_shelf
from tests.recorded import record
from tests.settings import given

ACC = "val-core/x/acc/mean@1"


BASE = compose("ppo", ["trainer.test_freq=1"]).config


def config(*rules: str, **trainer: object) -> schema.Config:
    """Return the configuration of a run with rules, which validates."""
    changed = {"stop_when": rules, **trainer}
    return BASE.model_copy(update={"trainer": BASE.trainer.model_copy(update=changed)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir.create(tmp_path_factory.mktemp("runs"), "p", "r", "ppo")


def end_of(run: RunDir, rule: str, rows: list[dict[str, float]], split: int) -> int:
    """Return the step that ends the run, 0 if none does; the run is resumed after `split` steps."""
    run.metrics.unlink(missing_ok=True)
    record(run.path, {step: rows[step - 1] for step in range(1, split + 1)})
    listener = StopRules(run, config(rule))
    if split and listener.on_step(split, {}):
        return split
    for step in range(split + 1, len(rows) + 1):
        if listener.on_step(step, rows[step - 1]):
            return step
    return 0


def column(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value} for value in values]


@pytest.mark.parametrize(
    ("rule", "rows", "step"),
    [
        (f"best({ACC}) > 0.95", column(ACC, 0.9, 0.95, 0.96, 0.1), 3),
        (f"{ACC} < 0.5 and best({ACC}) >= 0.9", column(ACC, 0.4, 0.9, 0.8, 0.49), 4),
        # 0.6 is the best of step 2; 0.6 again is no gain.
        (f"no_gain({ACC}, 2)", column(ACC, 0.5, 0.6, 0.5, 0.6, 0.7), 4),
        (f"no_gain({ACC}, 2, 0.05)", column(ACC, 0.5, 0.54, 0.55, 0.6), 3),
        ("no_gain(val/loss, 2)", column("val/loss", 2.0, 1.0, 1.5, 0.9, 0.95, 0.9), 6),
        # Steps without a validation do not count.
        (f"no_gain({ACC}, 1)", [{ACC: 0.5}, {"x/y": 1.0}, {ACC: 0.6}, {ACC: 0.6}], 4),
        # The start is 1, and three readings in a row are at or below 0.1.
        ("alarm(entropy_collapse)", column("actor/entropy", 1, 1, 1, 0.1, 0.2, 0.1, 0, 0.1), 8),
        (f"{ACC} > 0.5", column(ACC, float("nan"), float("inf"), 0.6), 3),
        (f"best({ACC}) > 0.95", column("critic/score/mean", 1, 1), 0),
    ],
)
def test_a_rule_ends_the_same_step_however_often_the_run_is_interrupted(
    rule: str, rows: list[dict[str, float]], step: int, run: RunDir
):
    splits = range((step or len(rows)) + 1)
    assert [end_of(run, rule, rows, split) for split in splits] == [step] * len(splits)


def test_hours_count_all_attempts(run: RunDir):
    run.update(seconds=7199.0)
    listener = StopRules(RunDir(run.path), config("hours(2)"))
    assert listener.on_step(1, {}) is None
    listener.run.update(seconds=7200.0)
    assert listener.on_step(2, {}) == "trainer.stop_when has hours(2): 2 h are over"


@pytest.mark.parametrize(
    ("patience", "message"),
    [
        (1, "the last value is not better than 0.6"),
        (2, "the last 2 values are not better than 0.6"),
    ],
)
def test_values_without_a_gain_are_counted(patience: int, message: str, run: RunDir):
    run.metrics.unlink(missing_ok=True)
    listener = StopRules(RunDir(run.path), config(f"no_gain({ACC}, {patience})"))
    ends = [listener.on_step(step, {ACC: 0.6}) for step in range(1, patience + 2)]
    assert ends == [None] * patience + [
        f"trainer.stop_when has no_gain({ACC}, {patience}): {message}"
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("alarm(entrpy_collapse)", "there is no alarm 'entrpy_collapse'"),
        ("alarm(kl)", "the alarm is off"),
        ("no_gain(val-core/x/acc/mean@1)", "no_gain has other arguments"),
        ("no_gain(val-core/x/acc/mean@1, 2.5)", "no_gain has other arguments"),
        ("no_gain(val-core/x/acc/mean@1, -1)", "a whole number N above 0, not '-1'"),
        ("hours(soon)", "needs a number above 0, not 'soon'"),
        ("best(val-core/x/acc/mean@1) = 1", "`=` sets a value, `==` compares"),
        ("state == 1", "'state' is no metric"),
        ("1 > 0", "it names no metric"),
        ("best(val-core/y/acc/mean@1) > 1", "no validation row has the source of val-core/y/"),
    ],
)
def test_a_wrong_rule_is_one_clear_error(rule: str, message: str):
    alarms = BASE.trainer.alarms.model_copy(update={"kl": None})
    with pytest.raises(ConfigError) as raised:
        StopRules.check(config("hours(8)", rule, alarms=alarms), None, ["x"])
    (problem,) = raised.value.problems
    assert message in problem.message
    assert rule in problem.message
    assert problem.where == KEY


def test_a_rule_about_validation_needs_validation():
    rule = f"best({ACC}) > 1"
    for settings, sources in ((config(rule, test_freq=-1), ["x"]), (config(rule), [])):
        with pytest.raises(ConfigError, match="nothing is validated"):
            StopRules.check(settings, None, sources)


def test_a_run_ends_early_and_trains_on_with_other_rules(tmp_path: Path):
    """The run is finished, exit code 0, and resumed it equals one that never stopped."""
    words = [
        "--inline",
        *small(write_shelf(tmp_path)),
        *given(save=2, val=None),
        "trainer.logger=[console]",
    ]
    rule = 'trainer.stop_when=["min(response_length/mean) > 0"]'
    done = rlctl("train", "grpo", "--name", "a", *words, rule, cwd=tmp_path)
    assert "step 1: the run ends, because trainer.stop_when has min(response_length" in done.stderr
    folder = tmp_path / "runs" / "quickstart" / "a"
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert [row["step"] for row in metrics(folder)] == [0, 1]
    assert "has already finished" in rlctl("resume", "a", "--inline", cwd=tmp_path).stderr
    assert "ended early  step 1: trainer.stop_when" in rlctl("show", "a", cwd=tmp_path).stdout
    rlctl("resume", "a", "--inline", "trainer.stop_when=[]", cwd=tmp_path)
    rlctl("train", "grpo", "--name", "b", *words, cwd=tmp_path)
    assert reproducible(folder) == reproducible(folder.with_name("b"))

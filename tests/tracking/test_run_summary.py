"""Key figures, number formats, ETA, step line and the last summary, against worked values."""

import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlctl.cli.startup import print_summary
from rlctl.cli.views.runs import ago
from rlctl.text import count, duration, sparkline
from rlctl.tracking.live_panel import LivePanel
from rlctl.tracking.run_summary import RunSummary, percent_or_number, validation_metric

ACC, REWARD = "val-core/openai/gsm8k/acc/mean@1", "val-core/openai/gsm8k/reward/mean@1"


def test_validation_metric_prefers_accuracy():
    assert (
        validation_metric({"step": 1, "val-aux/x/acc/mean@1": 0.1, REWARD: 0.5, ACC: 0.25}) == ACC
    )
    assert validation_metric({REWARD: 0.5, "val-core/x/acc/maj@8/mean": 0.9}) == REWARD
    assert validation_metric({"critic/score/mean": 0.5}) is None


def test_run_summary():
    rows = [
        {"step": 0, ACC: 0.25, REWARD: 0.3},
        {"step": 1, "timing_s/step": 2.0, "perf/total_num_tokens": 1000},
        {"step": 2, "timing_s/step": 3.0, "perf/total_num_tokens": 1200, ACC: 0.75},
        {"step": 3, "timing_s/step": math.nan, ACC: math.nan},
        {"step": 4, "timing_s/step": 1.5, ACC: 0.75},
        {"step": 5, ACC: 0.5},
    ]
    assert RunSummary.from_rows(rows) == RunSummary(
        step=5, metric=ACC, first=0.25, last=0.5, best=0.75, best_step=2, seconds=6.5, tokens=2200
    )


def test_best_loss_is_the_lowest():
    summary = RunSummary.from_rows(
        [{"step": 1, "val/loss": 2.0}, {"step": 2, "val/loss": 1.0}, {"step": 3, "val/loss": 1.5}]
    )
    assert (summary.first, summary.last, summary.best, summary.best_step) == (2.0, 1.5, 1.0, 2)


def test_run_summary_without_rows():
    assert RunSummary.from_rows([]) == RunSummary(None, None, None, None, None, None, 0.0, 0)


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        *((duration, 0.04, "0.0 s"), (duration, 59.96, "1m 00s"), (duration, 60, "1m 00s")),
        *((duration, 3599.6, "1h 00m"), (duration, 273600, "3d 4h")),
        *((ago, 5, "just now"), (ago, 60, "1 min ago"), (ago, 7300, "2 h ago")),
        (ago, 180000, "2 days ago"),
        *((count, 0, "0"), (count, 950, "950"), (count, 12345.6, "12.3k")),
        *((count, 4_560_000, "4.56M"), (count, 2.5e9, "2.5G")),
    ],
)
def test_forms_of_numbers(form, number, text):
    assert form(number) == text


def test_only_accuracies_are_percentages():
    assert percent_or_number(ACC, 0.2424) == "24.2 %"
    assert percent_or_number(REWARD, -0.25) == "-0.25"
    assert percent_or_number(ACC, None) == "-"


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([1.0, math.nan, 3.0]) == "▁█"
    assert sparkline([]) == ""
    assert sparkline([0, 0, 4, 4, 7, 7], width=3) == "▁▅█"
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_eta_is_pace_of_latest_steps_times_steps_left():
    panel = LivePanel(total_steps=100)
    assert panel.eta() is None
    panel.add(0, {}, at=0.0)
    assert panel.eta() is None
    for step in range(1, 30):
        panel.add(step, {}, at=10.0 + 2.0 * step)
    assert panel.eta() == pytest.approx(2.0 * 71)
    assert panel.line() == "step 29/100  eta 2m 22s"


def test_kl_is_that_to_the_reference() -> None:
    panel = LivePanel()
    panel.add(1, {"actor/ppo_kl": 0.5}, at=0.0)
    assert panel.line() == "step 1"
    panel.add(2, {"actor/ppo_kl": 0.5, "actor/kl_loss": 0.25}, at=0.0)
    assert panel.line() == "step 2  kl 0.25"


@pytest.mark.parametrize(
    ("row", "first", "line"),
    [
        ({REWARD: 1.07}, {REWARD: 0.444}, "val reward 1.07 (first 0.444)"),
        ({ACC: 0.75}, {ACC: 0.25}, "val acc 75.0 % (first 25.0 %)"),
        ({"val/loss": 0.5}, {"val/loss": 2.0}, "val loss 0.5 (first 2)"),
    ],
)
def test_the_validation_has_the_name_of_its_metric(
    row: dict[str, float], first: dict[str, float], line: str
) -> None:
    panel = LivePanel()
    panel.add(0, first, at=0.0)
    panel.add(1, row, at=1.0)
    assert line in panel.line()


def test_line_has_turns_and_outcomes_of_episodes():
    panel = LivePanel()
    row = {"agent/turns/mean": 3.25, "agent/outcome/length": 0.25, "agent/outcome/done": 0.75}
    panel.add(1, row, at=0.0)
    assert panel.line() == "step 1  turns 3.2  75% done, 25% length"


def test_phases_beside_a_step_are_not_part_of_its_time() -> None:
    panel = LivePanel()
    row = {"timing_s/gen": 60.0, "timing_s/wait_rollouts": 2.0, "timing_s/update_actor": 2.0}
    for more, expected in (({}, "rollout 94%"), ({"async/engines_idle": 0.4}, "rollouts 50%")):
        panel.add(1, row | more, at=0.0)
        console = Console(width=120, record=True, file=StringIO())
        console.print(panel)
        assert expected in console.export_text()


def test_summary_of_a_finished_run(capsys):
    rows = [
        {"step": 0, ACC: 0.25},
        {"step": 1, "critic/score/mean": 0.25, "perf/total_num_tokens": 1500.0},
    ]
    rows += [{"step": 2, ACC: 0.75, "critic/score/mean": 0.75, "perf/total_num_tokens": 1500.0}]
    print_summary(
        "finished", Path("runs/p/r"), rows, 72.3, [], ["rlctl show r --samples", "rlctl runs"]
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "finished: 2 steps in 1m 12s, 3k tokens",
        "  accuracy  25.0 % → 75.0 %   best 75.0 % at step 2",
        "  reward    0.25 → 0.75   ▁█",
        "  run       runs/p/r",
        "  next      rlctl show r --samples",
        "            rlctl runs",
    ]


def test_summary_of_a_fork_counts_the_steps_that_it_trained(capsys):
    rows = [{"step": 2, ACC: 0.25}, {"step": 3, "critic/score/mean": 0.25}]
    print_summary("finished", Path("runs/p/r"), rows, 3.0, [], [])
    assert capsys.readouterr().err.splitlines()[0] == "finished: 1 step in 3.0 s"


def test_summary_repeats_alarms_and_says_what_was_not_done(capsys):
    rows = [{"step": 0, ACC: 0.375}, {"step": 1, "critic/lr": 1e-5}, {"step": 2, "critic/lr": 1e-5}]
    alarm = {"name": "kl", "step": 1, "message": "KL is 3", "hint": "lower the lr", "over": None}
    other = {"name": "length_drift", "step": 2, "message": "long", "hint": "h", "over": 4}
    print_summary(
        "finished",
        Path("runs/p/r"),
        rows,
        3.0,
        [alarm | {"over": 1}, other, alarm | {"step": 2}],
        [],
    )
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  accuracy  37.5 % at step 0; not validated later, see trainer.test_freq",
        "  warning   only the critic was trained: the actor learns after "
        "trainer.critic_warmup steps",
        "  alarm     step 1: KL is 3, 2 times (lower the lr)",
        "  alarm     step 2: long, until step 4",
        "  run       runs/p/r",
    ]

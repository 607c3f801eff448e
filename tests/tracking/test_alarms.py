"""Alarm rules on series worked out by hand, and their independence of interruptions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.recipes.compose import base_settings
from rlctl.tracking.alarm_rules import RULES, fall_under_rising_reward
from rlctl.tracking.alarms import Alarms
from rlctl.tracking.console_tracker import ConsoleTracker
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import read_metrics
from rlctl.tracking.run_summary import Row
from tests.recorded import record

ACC = "val-core/x/acc/mean@1"


def changes(limits: dict[str, float], rows: list[Row]) -> list[tuple[str, int, bool]]:
    """Return (name, step, over) of every alarm."""
    alarms = Alarms(limits)
    return [(alarm.name, alarm.step, alarm.over) for row in rows for alarm in alarms.add(row)]


def column(name: str, *values: float) -> list[Row]:
    return [{"step": step, name: value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("name", "limit", "metric", "values", "expected"),
    [
        # The start is (2 + 1 + 3) / 3 = 2, so the limit is 0.2. Steps 5, 6, 8 are below it, and
        # only 8, 9, 10 in a row; 0.22 has recovered.
        (
            "entropy_collapse",
            0.1,
            "actor/entropy",
            [2, 1, 3, 1, 0.2, 0.1, 0.21, 0.1, 0.1, 0.1, 0.1, 0.23, 0.23, 0.21, 0.23, 0.23, 0.23],
            [(10, False), (17, True)],
        ),
        (
            "kl",
            0.5,
            "actor/reward_kl_penalty",
            [0, 9, 0, 0.5, 0.6, 0.7, 0.8, 0.46, 0.46, 0.46],
            [(6, False)],
        ),
        ("kl", 0.5, "actor/kl_loss", [0.5, 0.5, 0.5, 0.45, 0.44, 0.45], [(3, False), (6, True)]),
        (
            "update_kl",
            0.1,
            "actor/ppo_kl",
            [0.2, 0.2, float("nan"), 0.2],
            [(4, False)],
        ),  # NaN is no reading
        (
            "length_drift",
            3.0,
            "response_length/mean",
            [10, 10, 10, 3, 3, 3, 10, 10, 10],
            [(6, False), (9, True)],
        ),
        (
            "truncation",
            0.3,
            "response_length/clip_ratio",
            [0.3, 0.3, 0.3, 0.1, 0.1, 0.1],
            [(3, False), (6, True)],
        ),
        (
            "rollout_mismatch",
            0.02,
            "training/rollout_probs_diff_mean",
            [0.01, 0.03, 0.03, 0.03],
            [(4, False)],
        ),
        # The best three are 0.6, 0.66, 0.66 with the mean 0.64; the last three of step 9 have 0.22.
        (
            "reward_collapse",
            0.5,
            "critic/score/mean",
            [0.5, 0.55, 0.6, 0.66, 0.66, 0.6, 0.66, 0.0, 0.0, 0.0, 0.5, 0.6, 0.6],
            [(9, False), (12, True)],
        ),
        # Noise: the step from one value to the next is as large as the fall.
        ("reward_collapse", 0.5, "critic/score/mean", [0, 0.02, 0, 0.01, 0.02, 0.02, 0, 0, 0], []),
        # Negative: the range, of 9.9, is larger than the best.
        ("reward_collapse", 0.5, "critic/score/mean", [-10, -9, -5, -1, -0.1, -0.1, -0.3, -1], []),
        # The start is the largest of ten values, 2; three readings of 3 GiB or more.
        (
            "memory_growth",
            0.5,
            "perf/process_memory_gb/sandbox",
            [1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3.5, 4, 2, 2, 2],
            [(14, False), (17, True)],
        ),
        # Twice as much, but less than a GiB more.
        ("memory_growth", 0.5, "perf/process_memory_gb/a", [0.4] * 10 + [0.8] * 5, []),
        (
            "skipped_updates",
            1,
            "actor/skipped_updates",
            [0, 1, 2, 0, 1],
            [(2, False), (4, True), (5, False)],
        ),
    ],
)
def test_alarm_starts_and_ends_once(name, limit, metric, values, expected) -> None:
    rows = column(metric, *values)
    assert changes({name: limit}, rows) == [(name, step, over) for step, over in expected]
    assert changes({}, rows) == []  # null is off


def test_alarm_when_one_component_of_the_reward_rises_and_another_falls() -> None:
    """`format` falls by more than half of its start in step 7; `acc` has risen by more then."""
    falls = [1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.1, 0.1]
    rises = [0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6]
    rows: list[Row] = [
        {"step": step, "reward/format/mean": low, "reward/acc/mean": high, "reward/num_failed": 0}
        for step, (low, high) in enumerate(zip(falls, rises, strict=True), start=1)
    ]
    alarms = Alarms({"reward_components": 0.5})
    [alarm] = [alarm for row in rows for alarm in alarms.add(row)]
    assert alarm.step == 7
    assert "acc rises while format falls, both by 60%" in alarm.message
    assert "--components" in alarm.hint
    both = [{**row, "reward/format/mean": row["reward/acc/mean"]} for row in rows]
    assert changes({"reward_components": 0.5}, both) == []


def test_alarm_when_validation_falls_while_reward_rises() -> None:
    rewards = [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    rows = [dict(row) for row in column("critic/score/mean", *rewards)]
    for step, value in ((2, 0.5), (4, 0.46), (6, 0.44), (8, 0.49)):
        rows[step - 1][ACC] = value
    assert changes({"validation_falls": 0.1}, rows) == [
        ("validation_falls", 6, False),
        ("validation_falls", 8, True),
    ]
    validation, reward = (
        [(2, 0.5), (6, 0.44)],
        [(step + 1, value) for step, value in enumerate(rewards)],
    )
    assert fall_under_rising_reward(validation, reward) == pytest.approx(0.12)
    assert (
        fall_under_rising_reward(validation, [(step, -value) for step, value in reward]) == 0
    )  # both fall: that is another trouble
    assert fall_under_rising_reward(validation[:1], reward) is None


def test_alarm_when_validation_loss_rises() -> None:
    rows = [
        {"step": step, "critic/score/mean": step / 10, "val/loss": loss}
        for step, loss in enumerate([1.0, 0.8, 1.2], start=1)
    ]
    assert changes({"validation_falls": 0.4}, rows) == [("validation_falls", 3, False)]


def test_resumed_run_raises_the_same_alarms(tmp_path: Path) -> None:
    """Interrupt after each step in turn; read the history back from metrics.jsonl."""
    values = [2, 1, 3, 0.1, 0.1, float("nan"), 0.1, 1, 1, 1, 0.15, 0.15, 0.15]
    rows = column("actor/entropy", *values)
    expected = changes({"entropy_collapse": 0.1}, rows)
    assert [step for _, step, _ in expected] == [7, 10, 13]
    for stop in range(1, len(rows)):
        folder = tmp_path / str(stop)
        folder.mkdir()
        entropy = {int(row["step"]): row["actor/entropy"] for row in rows[:stop]}
        record(folder, {step: {"actor/entropy": value} for step, value in entropy.items()})
        alarms = Alarms({"entropy_collapse": 0.1}, read_metrics(folder / "metrics.jsonl"))
        later = [
            (alarm.name, alarm.step, alarm.over) for row in rows[stop:] for alarm in alarms.add(row)
        ]
        assert later == [alarm for alarm in expected if alarm[1] > stop]


def test_alarm_writes_an_event_and_a_console_line(capsys) -> None:
    events: list[str] = []
    trackers = Trackers(
        {"console": ConsoleTracker()},
        lambda kind, **fields: events.append(json.dumps([kind, fields])),
        TrackerTimeouts(10, 1, 1, 1),
        Alarms({"truncation": 0.3}),
    )
    for step in range(1, 8):
        trackers.log(step, {"response_length/clip_ratio": 0.5 if step < 5 else 0.0})
    kinds = [
        (kind, fields["step"], fields["name"], fields["value"])
        for kind, fields in map(json.loads, events)
    ]
    assert kinds == [("alarm", 3, "truncation", 0.5), ("alarm_over", 7, "truncation", 0.0)]
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("alarm")]
    assert shown[0].startswith(
        "alarm: step 3: truncation: 50% of the responses reach data.max_response_length (try"
    )
    assert shown[1] == "alarm over: step 7: truncation is back at 0% of the responses"


def test_every_alarm_has_a_config_key_and_a_limit() -> None:
    names = {
        key.removeprefix("trainer.alarms.")
        for key in base_settings()
        if key.startswith("trainer.alarms.")
    }
    names.add("rollout_mismatch")  # trainer.mismatch.warn
    assert names == {rule.name for rule in RULES}


def test_alarm_when_all_advantages_are_0_for_some_steps() -> None:
    """A step without the metric, such as a validation, neither counts nor breaks the series."""
    spans: list[tuple[float, float] | None] = [(0, 0), (0, 0), None, (-1, 0), (0, 0), None]
    spans += [(0, 0), (0, 0), (0, 0), (0, 2)]
    rows: list[Row] = [
        {"step": step}
        if span is None
        else {"step": step, "critic/advantages/min": span[0], "critic/advantages/max": span[1]}
        for step, span in enumerate(spans, start=1)
    ]
    assert changes({"zero_advantages": 3}, rows) == [
        ("zero_advantages", 8, False),
        ("zero_advantages", 10, True),
    ]


def test_a_reward_that_takes_most_of_several_steps() -> None:
    times = [(0.4, 0.5), (6.0, 7.0), (0.9, 7.0), (6.0, 7.0), (6.0, 7.0), (6.0, 7.0)]
    rows: list[Row] = [
        {"step": step, "timing_s/reward": reward, "timing_s/step": seconds}
        for step, (reward, seconds) in enumerate(times, start=1)
    ]
    assert changes({"slow_reward": 0.5}, rows) == [("slow_reward", 6, False)]

"""Key figures and number formats, against worked values."""

import math

import pytest

from rlctl.monitoring.run_summary import RunSummary, validation_metric
from rlctl.monitoring.text import ago, count, duration, percent_or_number, sparkline

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
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.96, "1m 00s"),
        (60, "1m 00s"),
        (3599.6, "1h 00m"),
        (273600, "3d 4h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


AGES = [
    (5, "just now"),
    (60, "1 min ago"),
    (7300, "2 h ago"),
    (180000, "2 days ago"),
]


@pytest.mark.parametrize(("seconds", "text"), AGES)
def test_ago(seconds, text):
    assert ago(seconds) == text


COUNTS = [
    (0, "0"),
    (950, "950"),
    (12345.6, "12.3k"),
    (4_560_000, "4.56M"),
    (2.5e9, "2.5G"),
]


@pytest.mark.parametrize(("number", "text"), COUNTS)
def test_counts(number, text):
    assert count(number) == text


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

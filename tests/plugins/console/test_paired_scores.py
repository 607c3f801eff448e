"""`rlctl eval` of two models: figures of prompts, their intervals, and the paired test."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlctl.errors import ConfigError
from rlctl.plugins.console.paired_scores import check_rows, figures, interval, rows
from rlctl.tracking.tracker import Sample
from tests.e2e.command import rlctl


def sample(score: float, truth: str = "1", pred: str | None = "1") -> Sample:
    return Sample("p", "r", truth, score, {}, 1, "stop", "set", pred, None)


def test_figures_and_intervals_of_prompts() -> None:
    scores = [1, 1, 0, 1, 0, 0, 0, 0]
    samples = [sample(score, pred=str(score)) for score in scores]
    found = {metric: values for (_, metric), values in figures(samples, 4).items()}
    assert found["mean@4"] == [0.75, 0.0]
    assert found["pass@4"] == [1.0, 0.0]
    assert found["maj@4"][0] > 0.75
    assert found["maj@4"][1] == 0
    # Wilson, for 8 of 10: https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert interval([1.0] * 30)[0] == pytest.approx(0.8864866, abs=1e-6)
    mean, half = 0.5, 12.7062 * math.sqrt(0.02) / math.sqrt(2)
    assert interval([0.4, 0.6]) == pytest.approx((mean - half, mean + half), abs=1e-4)


def test_paired_test_of_two_models() -> None:
    answers = [[sample(value) for value in each] for each in ((0, 0, 1, 0, 1), (1, 1, 1, 0, 0))]
    *_, test = rows(["a", "b"], [figures(own, 1) for own in answers])
    # Differences 1, 1, 0, 0, −1: t = 0.2/(0.83666/√5) = 0.534522 with 4 degrees of freedom.
    assert test["model"] == "b − a"
    assert test["mean"] == pytest.approx(0.2)
    assert test["p"] == pytest.approx(0.6213, abs=1e-4)
    assert (test["better"], test["worse"]) == (2, 1)
    check_rows(["a", "b"], answers)
    with pytest.raises(ConfigError, match="a and c were evaluated on other rows"):
        check_rows(["a", "c"], [answers[0], [sample(1, truth="2")] * 5])


def test_eval_compares_two_models(tmp_path: Path) -> None:
    given = ("data.val_max_samples=8", "--set", "data.val_files=[quickstart]")
    done = rlctl("eval", "quickstart", "quickstart", *given, "--json", cwd=tmp_path)
    one, two, test = json.loads(done.stdout)
    assert one == two
    assert (one["metric"], one["n"], test["n"]) == ("mean@1", 8, 8)
    assert (test["mean"], test["p"]) == (0, 1)
    shown = rlctl("eval", "quickstart", "--intervals", *given, cwd=tmp_path).stdout
    assert "95 % interval" in shown
    assert "better" not in shown
    refused = rlctl("eval", "quickstart", "b", "c", cwd=tmp_path, code=2)
    assert "compares two models, given 3" in refused.stderr

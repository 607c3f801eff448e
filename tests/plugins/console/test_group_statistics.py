"""Statistics of groups of runs, against worked values."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import yaml

from rlctl.plugins.console.group_statistics import Sample, two_sided_p
from rlctl.runs.run_dir import RunDir
from rlctl.runs.student_t import t_quantile
from tests.e2e.command import rlctl
from tests.recorded import record

ACC = "val-core/x/acc/mean@1"


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 30])
def test_p_is_5_percent_at_the_quantile(freedom: int):
    assert two_sided_p(t_quantile(freedom), freedom) == pytest.approx(0.05, rel=1e-4)
    assert two_sided_p(0, freedom) == pytest.approx(1)


def test_a_sample_worked_by_hand():
    """1 … 5: mean 3, deviation √2.5, so t = 3 / √0.5 = 4.243 with 4 degrees of freedom."""
    sample = Sample([1, 2, 3, 4, 5])
    assert sample.mean == 3
    assert sample.half == pytest.approx(2.7764 * 0.5**0.5)
    # For ν = 4: p = 1 − 3/2 (s − s³/3) with s = t / √(t² + 4), from the integral of cos³.
    s = 18**0.5 / 22**0.5
    assert sample.p_value() == pytest.approx(1 - 1.5 * (s - s**3 / 3))
    assert (Sample([1]).half, Sample([1]).p_value()) == (None, None)
    assert (Sample([0, 0]).p_value(), Sample([1, 1]).p_value()) == (1, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two groups of three seeds: 0.5, 0.6, 0.7, and 0.1, 0.2, 0.15 more."""
    folder = tmp_path_factory.mktemp("work")
    for kl, gains in ((False, (0, 0, 0)), (True, (0.1, 0.2, 0.15))):
        for seed, gain in enumerate(gains):
            run = RunDir.create(folder / "runs", "p", f"kl-{kl}-{seed}", "ppo")
            settings = {"trainer": {"seed": seed}, "algorithm": {"use_kl_in_reward": kl}}
            run.write_config(yaml.safe_dump(settings), {})
            record(run.path, {1: {ACC: 0.9}, 2: {ACC: 0.5 + seed / 10 + gain}})
            run.finish("finished", 0)
    return folder


def names() -> list[str]:
    return [f"kl-{kl}-{seed}" for kl in (True, False) for seed in (2, 0, 1)]


KEY = "algorithm.use_kl_in_reward"


def test_groups_have_mean_interval_and_a_paired_test(folder: Path):
    done = rlctl("compare", *names(), "--group-by", KEY, cwd=folder)
    assert "95 % interval" in done.stdout
    # The differences 0.1, 0.2, 0.15: mean 0.15, deviation 0.05, 4.3027 · 0.05 / √3 = 0.1242.
    assert f"{ACC}: True − False is 0.15, 95 % interval 0.02579 to 0.2742" in done.stderr
    assert "p = 0.0351 (paired t-test, 3 pairs)" in done.stderr
    shown = json.loads(rlctl("compare", *names(), "--group-by", KEY, "--json", cwd=folder).stdout)
    first = shown["groups"][0]
    assert first["value"] is False
    assert sorted(first["metrics"][ACC]["values"]) == pytest.approx([0.5, 0.6, 0.7])
    assert first["metrics"][ACC]["low"] == pytest.approx(0.6 - 4.3027 * 0.1 / 3**0.5)
    assert shown["paired"][0]["difference"]["n"] == 3


def test_an_aspect_of_a_metric_and_other_forms(folder: Path):
    words = ["compare", *names(), "--group-by", KEY, "-m", f"first({ACC})", "--format"]
    rows = list(csv.reader(io.StringIO(rlctl(*words, "csv", cwd=folder).stdout)))
    assert rows[0] == ["metric", KEY, "n", "mean", "95 % interval", "min", "max"]
    assert rows[1][:3] == [f"first({ACC})", "False", "3"]
    tex = rlctl(*words, "tex", cwd=folder).stdout.splitlines()
    assert tex[0] == r"\begin{tabular}{lrrrrrr}"
    assert tex[2].startswith(r"metric & algorithm.use\_kl\_in\_reward & n & mean & 95 \% interval")
    assert rlctl(*words, "md", cwd=folder).stdout.startswith("| metric | ")


def test_an_unknown_key_is_refused(folder: Path):
    failed = rlctl("compare", *names(), "--group-by", "algorithm.use_kl", cwd=folder, code=2)
    assert "no run has a field or key 'algorithm.use_kl'" in failed.stderr

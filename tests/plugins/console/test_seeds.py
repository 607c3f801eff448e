"""Mean and 95 % interval over runs that differ only in their seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlctl.plugins.console.report.content import content
from rlctl.plugins.console.report.curves import MAX_POINTS
from rlctl.plugins.console.report.seeds import interval, seed_bands, seed_groups, t_quantile
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.metric_table import MetricTable
from tests.recorded import record

NAN = float("nan")


def seeded(
    root: Path,
    name: str,
    seed: int,
    rows: Mapping[int, Mapping[str, float]] | None = None,
    **trainer: Any,
) -> Run:
    """Write a run with a seed and these rows."""
    run = RunDir.create(root, "demo", name, "ppo")
    settings = {"experiment_name": name, "seed": seed, "test_freq": 2, **trainer}
    run.write_config(yaml.safe_dump({"trainer": settings, "data": {"seed": seed}}), {})
    record(run.path, rows or {})
    run.finish("finished", 0)
    return read_run(run.path)


def bands(*runs: Run) -> list[dict[str, Any]]:
    return seed_bands(runs, [run.name for run in runs], [run.table() for run in runs])


def test_runs_that_differ_in_seeds_and_names_alone_are_a_group(tmp_path: Path) -> None:
    runs = [
        seeded(tmp_path, "a-seed1", 1),
        seeded(tmp_path, "b", 1, test_freq=3),
        seeded(tmp_path, "a-seed2", 2, run_dir="elsewhere"),
        seeded(tmp_path, "again", 2),  # the same seeds are no further sample
        seeded(tmp_path, "c", 3, test_freq=5),
    ]
    assert seed_groups(runs) == [[0, 2]]
    assert seed_groups(runs[:2]) == []


def test_other_data_are_another_experiment(tmp_path: Path) -> None:
    runs = [seeded(tmp_path, f"a{seed}", seed) for seed in (1, 2, 3)]
    other = RunDir(runs[2].path)
    other.update(data={"train.parquet": "0" * 64})
    assert seed_groups([*runs[:2], read_run(other.path)]) == [[0, 1]]


def test_interval_is_that_of_student() -> None:
    # Mean 2, standard deviation 1: half an interval is t(2) / sqrt(3) = 4.3027 / 1.7321.
    mean, half, number = interval(np.array([[1.0, 5.0], [2.0, NAN], [3.0, 7.0]]))
    assert mean.tolist() == [2.0, 6.0]
    assert half.tolist() == pytest.approx([2.48414, 12.7062], rel=1e-4)
    assert number.tolist() == [3, 2]
    # Tables of Student's t: 40, 60 and 120 degrees of freedom.
    found = [t_quantile(freedom) for freedom in (1, 30, 40, 60, 120)]
    assert found == pytest.approx([12.7062, 2.0423, 2.0211, 2.0003, 1.9799], abs=2e-4)


def test_each_step_has_the_mean_of_the_runs_that_reached_it(tmp_path: Path) -> None:
    rows = [
        {1: {"a": 1.0, "timing_s/step": 3600.0}, 2: {"a": 2.0}, 3: {"a": 3.0}},
        {1: {"a": 3.0, "timing_s/step": 7200.0}, 2: {"a": 4.0, "b": 1.0}},
        {1: {"a": 5.0, "timing_s/step": 3600.0}},
    ]
    (group,) = bands(
        *(seeded(tmp_path, f"a-{place}", place, each) for place, each in enumerate(rows))
    )
    assert (group["label"], group["runs"]) == ("a", [0, 1, 2])
    found = group["metrics"]["a"]
    assert (found["at"], found["y"], found["n"]) == ([0, 1], [3.0, 3.0], [3, 2])
    assert found["high"][0] - found["y"][0] == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert found["y"][0] - found["low"][0] == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert group["x"]["step"] == [1, 2]
    assert group["x"]["hours"] == pytest.approx([4 / 3, 1.5], rel=1e-5)
    assert "b" not in group["metrics"]  # one run is no sample


def test_names_without_a_common_start_and_no_rows(tmp_path: Path) -> None:
    (group,) = bands(seeded(tmp_path, "x", 1), seeded(tmp_path, "y", 2))
    assert group["label"] == "x"
    assert group["metrics"] == {}


def test_long_curves_are_thinned_and_a_report_has_the_groups(tmp_path: Path) -> None:
    runs = [seeded(tmp_path, f"long-{seed}", seed) for seed in (1, 2)]
    steps = np.arange(3 * MAX_POINTS)
    table = MetricTable(steps, ["a"], steps[:, None].astype(np.float64))
    found = content(runs, None, table_of=lambda _: table)["seeds"][0]
    assert len(found["metrics"]["a"]["y"]) == 3 * MAX_POINTS // 4
    assert found["metrics"]["a"]["low"] == found["metrics"]["a"]["high"]
    assert found["x"]["step"][:3] == [0, 4, 8]

"""Tables of commands as CSV, Markdown, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import yaml

from rlctl.runs.run_dir import RunDir
from tests.e2e.command import rlctl
from tests.recorded import record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    run = RunDir.create(folder / "runs", "p", "a_1", "ppo")
    run.write_config(yaml.safe_dump({"trainer": {"seed": 1}}), {})
    record(run.path, {1: {"critic/score/mean": 0.25}, 2: {"critic/score/mean": 0.5}})
    run.finish("finished", 0)
    return folder


def test_runs_in_each_form(folder: Path):
    words = ["runs", "--cols", "state,trainer.seed,critic/score/mean", "--format"]
    head, row = csv.reader(io.StringIO(rlctl(*words, "csv", cwd=folder).stdout))
    assert head == ["run", "state", "trainer.seed", "critic/score/mean"]
    assert row == ["a_1", "finished", "1", "0.5"]
    lines = rlctl(*words, "md", cwd=folder).stdout.splitlines()
    assert lines[1] == "| --- | --- | --- | --- |"
    assert lines[2] == "| a_1 | finished | 1 | 0.5 |"
    tex = rlctl(*words, "tex", cwd=folder).stdout.splitlines()
    assert tex[4] == r"a\_1 & finished & 1 & 0.5 \\"
    (shown,) = json.loads(rlctl(*words, "json", cwd=folder).stdout)
    assert shown == json.loads(rlctl(*words[:-1], "--json", cwd=folder).stdout)[0]


def test_a_run_in_a_form_is_its_tables(folder: Path):
    rows = list(csv.reader(io.StringIO(rlctl("show", "a_1", "--format", "csv", cwd=folder).stdout)))
    assert rows[0] == ["metric", "first", "last", "curve"]
    assert rows[1][:3] == ["critic/score/mean", "0.25", "0.5"]
    # The next command in the same process prints as usual.
    assert "folder" in rlctl("show", "a_1", cwd=folder).stdout


def test_no_sweep_is_no_table(folder: Path):
    assert rlctl("sweeps", "--format", "csv", cwd=folder).stdout == ""

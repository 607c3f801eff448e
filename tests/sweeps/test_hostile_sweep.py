"""Folders of sweeps that others made: wrong types, names that lead elsewhere, links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.process import DriverProcess
from rlctl.sweeps.results import results
from rlctl.sweeps.sweep_launch import resume
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord
from tests.recorded import called
from tests.sweeps.test_study import settings

TABLE = {
    "outcomes": [
        {
            "trial": {"number": 0, "overrides": ["data.seed=1"]},
            "state": "running",
            "value": None,
            "values": {"2": 0.5},
        }
    ],
    "importances": {"data.seed": 1.0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record = SweepRecord(
        name="s",
        project="p",
        verb="ppo",
        recipe="ppo",
        base="ppo_trainer",
        fixed=[],
        axes=["data.seed=1,2"],
        settings=settings().model_dump(),
        config_sha256="0",
        total_steps=1,
        first_seed=1,
        command=[],
        cwd="",
        created="2026-01-01T00:00:00+00:00",
        process=DriverProcess.current(),
        state="finished",
    )
    sweep = SweepDir.create(tmp_path / "runs", record)
    (sweep.path / "trials.json").write_text(json.dumps(TABLE))
    return sweep.path


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | changes), encoding="utf-8")


def test_a_record_and_a_table_of_later_versions_are_read(folder: Path) -> None:
    edit(folder / "sweep.json", later=1)
    edit(folder / "trials.json", later=1)
    [trial] = results(SweepDir(folder)).trials
    assert (trial.state, trial.value, trial.overrides) == ("stopped", 0.5, ["data.seed=1"])


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {}},
        {"settings": {"mode": "max", "metric": None, "seeds": 10**9}},
        {"axes": "data.seed=1,2"},
        {"process": {"pid": "x"}},
        {"first_seed": None},
        {"name": "../../elsewhere"},
        {"name": "/etc"},
        {"name": ".."},
    ],
)
def test_a_record_of_wrong_types_or_names_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "sweep.json", **changes)
    with pytest.raises(ConfigError, match="cannot read the record of a sweep"):
        SweepDir(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"outcomes": 1},
        {"outcomes": [TABLE["outcomes"][0] | {"values": {"x": 0.5}}]},
        {"outcomes": [TABLE["outcomes"][0] | {"trial": {"number": -1, "overrides": []}}]},
        {"outcomes": [TABLE["outcomes"][0] | {"trial": {"number": 1, "overrides": "ab"}}]},
        {"importances": {"a": "b"}},
    ],
)
def test_a_table_of_wrong_types_is_none(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "trials.json", **changes)
    assert SweepDir(folder).read_table() is None


def test_commands_survive_what_they_cannot_read(folder: Path, here: Path) -> None:
    edit(folder / "sweep.json", settings={})
    assert called("sweeps", cwd=here).returncode == 0
    edit(folder / "trials.json", outcomes=1)
    assert called("show", "s", cwd=here).returncode in (3, 4)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    for name in ("trials.json", "sweep.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        if name == "trials.json":
            assert SweepDir(folder).read_table() is None
    with pytest.raises(ConfigError, match="cannot read the record of a sweep"):
        SweepDir(folder)


def test_links_are_named_before_a_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another-user"))
    (folder / "logs").rmdir()
    (folder / "logs").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"not made by you .* the link .*logs"):
        resume(SweepDir(folder), lambda *_: None)

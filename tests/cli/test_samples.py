"""`rlctl show --samples` of a run with episodes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.runs.run_dir import RunDir
from tests.recorded import record
from tests.tracking.test_transcripts import EPISODE, SAMPLE

METRICS = ("agent/turns/mean", "agent/outcome/done", "tool/calculator/errors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = RunDir.create(tmp_path / "runs", "p", "r", "grpo")
    samples = [replace(SAMPLE, episode=EPISODE), SAMPLE]
    record(run.path, {1: dict.fromkeys(METRICS, 0.5)}, {1: samples})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_episodes_are_printed_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "r", "--samples"]) == 0
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert first.splitlines() == [
        "right  score 0.5  acc 1  12 tokens  stop  x",
        "prompt: p",
        "assistant  trained, 7 tokens, reward 0.5, 0.25 s",
        "12 * 12?",
        "tool calculator  0.125 s",
        "144",
        "assistant  trained, 5 tokens, 0.5 s",
        "#### 144",
        "outcome: timeout, 2 turns, calculator 2× (1 timeout), call 1× (1 malformed), 1.5 s",
        "error: the episode took longer than 1 s",
        "truth: t",
    ]
    assert second.splitlines()[1:] == ["prompt: p", "response: r", "truth: t"]


@pytest.mark.usefixtures("folder")
def test_json_and_search_have_the_episode(capsys: pytest.CaptureFixture[str]) -> None:
    for sought in ("LONGER THAN", "144"):
        assert main(["show", "r", "--grep", sought, "--json"]) == 0
        [shown] = json.loads(capsys.readouterr().out)["samples"]
        assert shown["episode"] == json.loads(json.dumps(asdict(EPISODE)))


@pytest.mark.usefixtures("folder")
def test_show_has_the_metrics_of_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "r"]) == 0
    out = capsys.readouterr().out
    for name in METRICS:
        assert name in out

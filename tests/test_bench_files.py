"""Files of `make bench` and their comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, results


def report(**ratios: float) -> dict[str, Any]:
    better = {"speed": "higher", "seconds": "lower"}
    found = [{"name": name, "ratio": each, "better": better[name]} for name, each in ratios.items()]
    return {"benchmarks": {"step": {"ratios": found}}}


def run(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, content in zip(files, (old, new), strict=True):
        file.write_text(json.dumps(content))
    return compare.main([*map(str, files), *options])


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        ({"speed": 1.83, "seconds": 1.09}, []),
        ({"speed": 1.78, "seconds": 1.0}, ["speed: 2 → 1.78"]),
        ({"speed": 2.5, "seconds": 1.2}, ["seconds: 1 → 1.2"]),
        ({"speed": 2.0}, ["seconds: missing"]),
    ],
)
def test_a_loss_of_more_than_ten_percent_fails(
    new: dict[str, float], worse: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, report(speed=2.0, seconds=1.0), report(**new)) == int(bool(worse))
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE")]
    assert len(named) == len(worse)
    assert all(f"step: {each}" in line for each, line in zip(worse, named, strict=True))


def test_the_allowed_loss_can_be_set(tmp_path: Path) -> None:
    old, new = report(speed=2.0, seconds=1.0), report(speed=1.5, seconds=1.0)
    assert run(tmp_path, old, new, "--allowed", "30") == 0


def test_files_without_a_common_ratio_are_not_equal(tmp_path: Path) -> None:
    other = {"benchmarks": {"rollout": report(speed=1.0)["benchmarks"]["step"]}}
    assert run(tmp_path, report(speed=2.0), other) == 1


def test_ratios_are_recorded_for_make_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.record("nowhere", 1.0, "higher")
    file = tmp_path / "ratios.jsonl"
    monkeypatch.setenv(results.FILE, str(file))
    rows = [{"engine": "hf", "tokens/s": 5.0, "ratio": 2.0}]
    results.record_rows(rows, {"ratio": "higher"})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"name": "hf, ratio", "ratio": 2.0, "better": "higher"}
    ]

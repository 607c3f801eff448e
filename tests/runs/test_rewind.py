"""Rewinding of a run to a step, also with broken lines in its metrics."""

import json
from pathlib import Path

import pytest

from rlctl.runs.rewind import rewind
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.history import missing_steps


def run_with(tmp_path: Path, lines: list[str]) -> RunDir:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    run.metrics.write_text("".join(lines))
    return run


def rows(*steps: int) -> list[str]:
    return [json.dumps({"step": step}) + "\n" for step in steps]


def test_later_rows_and_samples_are_moved_to_the_attempt(tmp_path: Path) -> None:
    run = run_with(tmp_path, [*rows(0, 1, 2, 3), '{"step": 4, "x'])
    for step in (2, 3):
        run.generations(step).write_text("{}\n")
    unfinished = [run.path / ".metrics.jsonl.17.tmp", run.generations(3).with_name(".step_3.tmp")]
    for file in unfinished:
        file.touch()
    done = rewind(run, 2)
    assert (done.num_removed, done.lost) == (1, [])
    assert run.metrics.read_text() == "".join(rows(0, 1, 2))
    taken = run.attempt / "taken_back"
    assert (taken / "metrics.jsonl").read_text() == "".join(rows(3))
    assert [each.name for each in (run.path / "generations").iterdir()] == ["step_000002.jsonl"]
    assert not any(file.exists() for file in unfinished)


@pytest.mark.parametrize(
    ("lines", "kept", "lost", "message"),
    [
        (
            [*rows(0, 1, 2), '{"step": 3, "x"\n', *rows(4)],
            [0, 1, 2],
            [],
            "removed a broken line at {}:4",
        ),
        (
            [*rows(0), '{"step": 1, "x\n', *rows(2), "\0\0\0\n", *rows(4)],
            [0, 2],
            [1],
            "removed a broken line at {0}:2, removed a broken line at {0}:4, "
            "the metrics of these steps are lost: 1",
        ),
        (
            ["[]\n", *rows(1, 2, 3)],
            [1, 2],
            [],
            "removed a broken line at {}:1, metrics before step 1 are lost",
        ),
    ],
    ids=["after the step", "before the step", "first line"],
)
def test_broken_lines_are_removed_and_lost_rows_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lines: list[str],
    kept: list[int],
    lost: list[int],
    message: str,
) -> None:
    run = run_with(tmp_path, lines)
    assert rewind(run, 2).lost == lost
    assert run.metrics.read_text() == "".join(rows(*kept))
    assert [each.message for each in caplog.records] == [message.format(run.metrics)]
    taken = (run.attempt / "taken_back" / "metrics.jsonl").read_text()
    assert sorted(taken + run.metrics.read_text()) == sorted("".join(lines))


def test_broken_event_makes_a_tracker_count_as_behind(tmp_path: Path) -> None:
    told = json.dumps({"kind": "trackers_told", "trackers": ["wandb"]}) + "\n"
    events = tmp_path / "events.jsonl"
    events.write_text(told)
    assert missing_steps(tmp_path, "wandb", [1, 2]) == set()
    events.write_text(f'{{"kind": "resu\n{told}')
    assert missing_steps(tmp_path, "wandb", [1, 2]) == {1, 2}

"""Rows of the record are read back unchanged, also after a kill or damage, and rewound."""

import errno
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.runs.rewind import Reported, rewind
from rlctl.runs.run_dir import RunDir
from rlctl.tracking import jsonl
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import RECORD, Trackers
from rlctl.tracking.jsonl import (
    RESPONSES,
    JsonlTracker,
    generations_file,
    read_generations,
    read_metrics,
)
from rlctl.tracking.threaded import first_missing_step
from rlctl.tracking.tracker import RunInfo, Sample
from tests.small_disk import fill, small_disk


def started(folder: Path) -> JsonlTracker:
    tracker = JsonlTracker()
    tracker.start(RunInfo("id", "project", "name", folder, 10, {}))
    return tracker


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_floats_read_back_as_the_same_bits(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    tracker = started(folder)
    for step, value in enumerate(values):
        tracker.log(step, {"x": value})
    tracker.finish("finished")
    assert [bits(row["x"]) for row in read_metrics(folder / "metrics.jsonl")] == [
        bits(value) for value in values
    ]


def test_numpy_scalars_become_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    started(tmp_path).log(1, {"x": numpy.float32(0.1), "y": numpy.float64(0.1)})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 1, "x": 0.10000000149011612, "y": 0.1}


def test_non_finite_values_are_null_and_read_as_nan(tmp_path):
    started(tmp_path).log(1, {"nan": math.nan, "inf": -math.inf, "fine": 1.0})
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "nan": null, "inf": null, "fine": 1.0}\n'
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["nan"])
    assert math.isnan(row["inf"])
    assert row["fine"] == 1.0


def test_incomplete_last_line_is_skipped_and_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 0.5}\n{"step": 2, "x": 0.')
    assert read_metrics(path) == [{"step": 1, "x": 0.5}]
    started(tmp_path).log(2, {"x": 0.25})
    assert read_metrics(path) == [{"step": 1, "x": 0.5}, {"step": 2, "x": 0.25}]


@pytest.mark.parametrize(
    "line", ["not json", "[1, 2]", '{"x": 1.0}', '{"step": 1, "x": "text"}', "\0" * 9, '{"step":']
)
def test_broken_line_is_skipped_with_one_warning_that_names_it(tmp_path, line, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    for _ in range(2):
        assert [row["step"] for row in read_metrics(path)] == [0, 2]
    assert [each.message for each in caplog.records] == [f"skipped a broken line at {path}:2"]


def one(text: str) -> list[Sample]:
    return [Sample(text, "", "", 0.0, {}, 1, "stop", "s")]


def test_samples_wait_in_memory_while_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        tracker = started(disk)
        (disk / "generations").mkdir()
        filler = fill(disk)
        for step in (1, 2):
            with pytest.raises(OSError, match="No space left"):
                tracker.generations(step, one(f"{step}" * 5000))
        assert list((disk / "generations").iterdir()) == []  # no temporary file
        filler.unlink()
        tracker.log(3, {"x": 1.0})
        for step in (1, 2):
            assert read_generations(generations_file(disk, step)) == one(f"{step}" * 5000)


def test_ground_truth_may_be_anything_and_holds_up_no_later_sample(tmp_path, caplog):
    tracker = started(tmp_path)
    for step, truth in enumerate([{"answer": [math.nan, 2.0]}, {(1, 2): "a key"}, "5"], 1):
        tracker.generations(step, [replace(one("x")[0], ground_truth=truth)])
    assert not tracker.pending_samples
    (sample,) = read_generations(generations_file(tmp_path, 1))
    assert sample.ground_truth == {"answer": [None, 2.0]}
    assert "the validation samples of step 2 are not written: keys must be str" in caplog.text
    assert not generations_file(tmp_path, 2).exists()
    assert len(read_generations(generations_file(tmp_path, 3))) == 1


def test_samples_in_memory_are_bounded(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl, "MAX_PENDING", 2)
    monkeypatch.setattr(jsonl, "write_samples", refuse)
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        with pytest.raises(OSError, match="No space left"):
            tracker.generations(step, one("x"))
    assert list(tracker.pending_samples) == [("generations", 2), ("generations", 3)]
    assert "the validation samples of step 1 are lost" in caplog.text
    monkeypatch.undo()
    tracker.finish("finished")
    assert len(read_generations(generations_file(tmp_path, 2))) == 1


def test_samples_read_back_equal(tmp_path):
    samples = [
        Sample(
            "1 + 1 = ?\n", "#### 2", "2", 1.0, {"acc": 1.0, "format": 0.5}, 4, "stop", "arithmetic"
        ),
        Sample("für €", "", ["2", "two"], 0.0, {}, 0, "length", "arithmetic"),
    ]
    tracker = started(tmp_path)
    tracker.generations(20, samples)
    path = generations_file(tmp_path, 20)
    assert path == tmp_path / "generations" / "step_000020.jsonl"
    assert read_generations(path) == samples
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file is left


VERDICTS = [
    ({"acc": 1.0}, 0.0, True),
    ({"acc": 0.0}, 1.0, False),
    ({}, 1.0, True),
    ({}, 0.1, False),
]


@pytest.mark.parametrize(("components", "score", "right"), VERDICTS)
def test_right_depends_on_the_accuracy_or_else_the_score(components, score, right):
    assert Sample("", "", "", score, components, 1, "stop", "").right is right


def run_with(tmp_path: Path, lines: list[str]) -> RunDir:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    run.metrics.write_text("".join(lines))
    return run


def rows(*steps: int) -> list[str]:
    return [json.dumps({"step": step}) + "\n" for step in steps]


def test_later_rows_and_samples_are_moved_to_the_attempt(tmp_path: Path) -> None:
    run = run_with(tmp_path, [*rows(0, 1, 2, 3), '{"step": 4, "x'])
    for step in (2, 3):
        generations_file(run.path, step).write_text("{}\n")
    unfinished = [
        run.path / ".metrics.jsonl.17.tmp",
        generations_file(run.path, 3).with_name(".step_3.tmp"),
    ]
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


@pytest.mark.parametrize("left", [[], [2], [2, 3], None])
def test_rows_missing_at_the_front_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: list[int] | None
) -> None:
    """The file was cut at its front, emptied or removed."""
    run = run_with(tmp_path, rows(*(left or ())))
    if left is None:
        run.metrics.unlink()
    lost = [step for step in range(4) if step not in (left or ())]
    assert rewind(run, 3, Reported(first=0)).lost == lost
    assert f"the metrics of these steps are lost: {'0 to 3' if len(lost) > 3 else '0, 1'}" in (
        caplog.text
    )


def test_missing_rows_are_restored_from_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, [*rows(0, 1, 4), '{"step": 5, "x'])
    spare = "".join(rows(1, 2, 3, 6)).encode()
    assert rewind(run, 5, Reported(0, None, spare)).lost == [5]
    assert run.metrics.read_text() == "".join(rows(0, 1, 2, 3, 4))
    assert "lost: 5" in caplog.text
    run.metrics.unlink()
    assert rewind(run, 2, Reported(1, None, spare)).lost == []
    assert run.metrics.read_text() == "".join(rows(1, 2))


def test_training_responses_wait_for_a_full_disk(tmp_path: Path) -> None:
    """They are written when there is room again; what is never written is reported."""
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        run = RunDir.create(disk, "p", "r", "ppo")
        found: list[tuple[str, int]] = []
        tracker = started(run.path)
        timeouts = TrackerTimeouts(1, 1.0, 1.0, 1.0)
        report = lambda kind, **fields: found.append((kind, fields["step"]))  # noqa: E731
        trackers = Trackers({RECORD: tracker}, report, timeouts)
        trackers.log(1, {"a": 1.0})
        assert json.loads(tracker.not_certain)["step"] == 1
        filler = fill(disk)
        trackers.responses(2, one("x" * 9000))
        trackers.log(2, {"a" * 9000: 1.0})
        trackers.log(3, {"a": 2.0})
        assert [json.loads(row)["step"] for row in tracker.not_certain.splitlines()] == [2, 3]
        filler.unlink()
        trackers.log(4, {"a": 1.0})
        assert generations_file(run.path, 2, RESPONSES).is_file()
        assert len(read_metrics(run.metrics)) == 4
        filler = fill(disk)
        trackers.responses(5, one("x" * 9000))
        trackers.finish("finished")
        assert found == [("rollouts_not_written", 5)]
        filler.unlink()


def test_broken_event_makes_a_tracker_count_as_behind(tmp_path: Path) -> None:
    told = json.dumps({"kind": "trackers_told", "trackers": ["wandb"]}) + "\n"
    events = tmp_path / "events.jsonl"
    events.write_text(told)
    assert first_missing_step(tmp_path, "wandb", 3) == 3
    events.write_text(f'{{"kind": "resu\n{told}')
    assert first_missing_step(tmp_path, "wandb", 3) == 0

"""Summaries and tables of metrics, and settings, equal the rows and the YAML."""

import hashlib
import json
import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlctl.recipes.compose import compose
from rlctl.runs.settings import read_setting, read_settings
from rlctl.tracking import metric_table
from rlctl.tracking import summary as summaries
from rlctl.tracking.json_lines import Position
from rlctl.tracking.jsonl import JsonlTracker, metric_rows, read_metrics
from rlctl.tracking.metric_table import MetricTable
from rlctl.tracking.run_summary import RunSummary
from rlctl.tracking.summary import SERIES, SUMMARY_FILE, MetricsSummary, read_summary, write_summary
from rlctl.tracking.tracker import RunInfo

ACC = "val-core/x/acc/mean@1"


def rows(first: int, end: int) -> list[dict[str, float | None]]:
    generator = random.Random(first)
    return [
        {"step": step, "loss": generator.random(), "timing_s/step": 2.0}
        | ({"perf/total_num_tokens": 100 + step} if step % 2 else {"rare": None})
        | ({ACC: generator.choice([0.25, 0.5])} if step % 3 == 0 else {})
        for step in range(first, end)
    ]


def append(path: Path, what: list[dict[str, float | None]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in what))


def read_afresh(path: Path) -> MetricsSummary:
    """Return the summary of all rows, without a stored one."""
    path.with_name(SUMMARY_FILE).unlink(missing_ok=True)
    return read_summary(path.parent)


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_summary_equals_that_of_the_rows(tmp_path: Path, monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(summaries, "_ROWS", chunk)
    path = tmp_path / "metrics.jsonl"
    append(path, rows(1, 20))
    summary = read_summary(tmp_path)
    assert summary.figures == RunSummary.from_rows(read_metrics(path))
    losses = [row["loss"] for row in read_metrics(path)]
    assert dict(zip(SERIES, summary.metrics["loss"], strict=True)) == {
        "first": losses[0],
        "last": losses[-1],
        "min": min(losses),
        "max": max(losses),
        "count": 19,
    }
    assert "rare" not in summary.metrics
    assert summary.curves == {ACC: [row[ACC] for row in read_metrics(path) if ACC in row]}


@pytest.mark.parametrize("chunk", [1, 7, 4096])
@pytest.mark.parametrize("number", [1, 64, 65, 128, 129, 1000])
def test_a_curve_has_every_nth_value(tmp_path: Path, monkeypatch, chunk: int, number: int) -> None:
    monkeypatch.setattr(summaries, "_ROWS", chunk)
    append(tmp_path / "metrics.jsonl", [{"step": n, "train/loss": float(n)} for n in range(number)])
    (points,) = read_summary(tmp_path).curves.values()
    stride = int(points[1]) if number > 1 else 1
    assert points == [float(n) for n in range(0, number, stride)]
    assert number <= 64 * stride < max(2 * number, 65)


def test_the_run_writes_its_summary_and_readers_add_later_rows(tmp_path: Path, monkeypatch) -> None:
    path, file = tmp_path / "metrics.jsonl", tmp_path / SUMMARY_FILE
    tracker = JsonlTracker()
    tracker.start(RunInfo("r", "p", "id", tmp_path, 10, {}))
    for number, row in enumerate(rows(0, 10)):
        tracker.log(number, {name: math.nan if v is None else v for name, v in row.items()})
    tracker.finish("finished")
    written = json.loads(file.read_bytes())
    assert written["figures"]["step"] == 9
    assert written["series"] == [*SERIES]
    with path.open("a") as out:
        out.write('{"step": 10, "lo')  # the run was killed
    assert read_summary(tmp_path).figures.step == 9  # type: ignore[union-attr]
    path.write_text(path.read_text().rpartition("\n")[0] + "\nbroken\n")
    append(path, rows(10, 20))
    starts: list[int] = []
    read = summaries.read_lines

    def spy(path, on_broken, valid, position):
        starts.append(position.line)
        return read(path, on_broken, valid, position)

    monkeypatch.setattr(summaries, "read_lines", spy)
    grown = read_summary(tmp_path)
    assert json.loads(file.read_bytes()) == written  # only the run changes it
    assert starts == [10]
    assert grown == read_afresh(path)
    assert grown.problem == f"skipped a broken line at {path}:11"


@pytest.mark.parametrize("change", ["rewound", "shortened", "rewritten", "missing", "copied"])
def test_other_changes_read_the_file_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, rows(0, 10))
    read_summary(tmp_path)
    if change == "rewound":  # a new file, as a resumed run writes it
        aside = tmp_path / "aside"
        append(aside, rows(0, 5))
        aside.replace(path)
        append(path, rows(5, 30))
    elif change == "shortened":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    elif change == "rewritten":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(100, 130)))
    elif change == "copied":
        aside = tmp_path / "aside"
        aside.write_bytes(path.read_bytes())
        aside.replace(path)
    else:
        path.unlink()
    assert read_summary(tmp_path) == read_afresh(path)


@pytest.mark.parametrize(
    "change",
    [
        {"figures": {"step": "1"}},
        {"figures": {"metric": 3}},
        {"figures": {"seconds": float("inf")}},
        {"figures": {"no such": 3}},
        {"metrics": {"loss": [1, 2, 3, 4]}},
        {"metrics": {"loss": [1, 2, 3, 4, "5"]}},
        {"metrics": [1]},
        {"curves": {"loss": ["a"]}},
        {"curves": {"unknown": [1.0]}},
        {"series": ["last"]},
        {"position": {"offset": -1, "line": 0, "mark": 0}},
        {"position": {"offset": 1e400, "line": 0, "mark": 0}},
        *({"broken": broken} for broken in ("ab", [], 0, "")),
        None,
    ],
)
def test_a_damaged_summary_is_not_believed(tmp_path: Path, change: dict | None) -> None:
    append(tmp_path / "metrics.jsonl", rows(0, 10))
    expected = read_summary(tmp_path)
    file = tmp_path / SUMMARY_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change) if change else '{"figures')
    assert read_summary(tmp_path) == expected
    write_summary(tmp_path)
    assert MetricsSummary.from_dict(json.loads(file.read_text())) == expected


def test_sums_that_no_number_holds_are_limited(tmp_path: Path) -> None:
    row = {"timing_s/step": 1e308, "perf/total_num_tokens": 1e308}
    append(tmp_path / "metrics.jsonl", [{"step": step} | row for step in range(2)])
    for _ in range(2):
        figures = read_summary(tmp_path).figures
        assert figures is not None
        assert (figures.seconds, figures.tokens) == (float(sys.maxsize), sys.maxsize)


def test_a_pipe_in_the_place_of_a_summary_is_not_read(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", rows(0, 10))
    os.mkfifo(tmp_path / SUMMARY_FILE)
    assert read_summary(tmp_path) == read_afresh(tmp_path / "metrics.jsonl")


def test_summaries_of_huge_values_are_believed(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", [{"step": step, "loss": 1e308} for step in range(3)])
    write_summary(tmp_path)
    assert MetricsSummary.from_dict(json.loads((tmp_path / SUMMARY_FILE).read_text())).metrics


def test_a_summary_that_cannot_be_written_is_computed(tmp_path: Path, monkeypatch) -> None:
    append(tmp_path / "metrics.jsonl", rows(0, 10))
    (tmp_path / SUMMARY_FILE).mkdir()
    assert read_summary(tmp_path).figures.step == 9  # type: ignore[union-attr]
    tracker = JsonlTracker()
    tracker.start(RunInfo("r", "p", "id", tmp_path, 10, {}))
    tracker.log(10, {"loss": 1.0})
    assert read_summary(tmp_path).figures.step == 10  # type: ignore[union-attr]
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    found = read_summary(tmp_path)
    assert (found.figures, found.metrics) == (None, {})
    assert "directory" in (found.problem or "")


def read_recorded(folder: Path, text: str) -> dict:
    """Return all settings, each read alone from a file with a recorded hash."""
    (folder / "config.yaml").write_text(text)
    expected = read_settings(folder)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    for key in [*expected, *(key.rpartition(".")[0] for key in expected), "none", "a.none"]:
        assert read_setting(folder, key, sha256) == expected.get(key), key
        assert read_setting(folder, key, None) == expected.get(key), key
    return expected


@pytest.mark.parametrize("verb", ["ppo", "grpo", "sft"])
def test_settings_of_a_recipe_equal_those_of_the_parsed_file(verb: str, tmp_path: Path) -> None:
    given = ["trainer.tracking.description='two lines:\n  a: 1\n\nb'", "trainer.project_name='yes'"]
    text = yaml.safe_dump(compose(verb, given).recorded, sort_keys=False, allow_unicode=True)
    found = read_recorded(tmp_path, text)
    assert found["trainer.tracking.description"] == "two lines:\n  a: 1\n\nb"


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": 1, "c": {"d": [{"none": 1, "x": 2}, [3]]}}, "none": {}},
        {"a": [{"none": 1}], "b": {"yes": 1, "3": 2, 4: 5, "x.y": {"z": 6}, "e-f/g": 7}},
        {"a": "x\n  none: 1\nnone: 2\n", "c": {"a": "x: y" * 50, "d": "# no"}, "e": "a: b"},
        {"a": {"none2": 1, "b": -1.5e-7, "c": "1e5", "d": "012", "e": None, "f": "проба"}},
    ],
)
def test_settings_in_other_shapes_equal_those_of_the_parsed_file(value: dict, tmp_path: Path):
    read_recorded(tmp_path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1, 2]\nb: *x\n",
        "---\na:\n    b: 1\n",
        "a: {b: 1,\nc: 2}\n",
        "a:\n  b: |\n    c: 1\n",
    ],
)
def test_a_file_that_was_edited_is_parsed(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    for key, value in read_settings(tmp_path).items():
        assert read_setting(tmp_path, key, "0" * 64) == value


@pytest.mark.parametrize("text", ["", "a: [1\n", "- 1\n", "text", "a: b: c\n", "\x00", "[" * 5000])
def test_unreadable_text_has_no_settings(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert read_settings(tmp_path) == {}
    for sha256 in (None, hashlib.sha256(text.encode()).hexdigest()):
        assert read_setting(tmp_path, "a", sha256) is None


LINES = [
    '{"step": 0, "a": 1, "b": null}',
    '{"step": 1, "b": 2.5, "a": 1e300}',  # another order
    '{"step": 2, "a": "text"}',
    '{"step": 3, "a": ',
    '{"a": 3.0}',
    '{"step": 4, "a": NaN, "c": Infinity}',
    '{"step": 5, "a": 18446744073709551617, "d": -0.0}',
    "null",
    '{"step": 6}',
    '{"step": 7, "a": 1%s}' % ("0" * 400),
]


def test_tables_hold_the_finite_values_of_the_rows(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES) + '\n{"step": 7, "a": 1}')  # the last line is incomplete
    monkeypatch.setattr(metric_table, "_ROWS", 2)
    expected: list[dict[str, float]] = []
    broken: list[list[int]] = []
    expected = [
        {name: value for name, value in row.items() if math.isfinite(value)}
        for row in metric_rows(path, lambda _, lines: broken.append(list(lines)))
    ]
    found: list[dict[str, float]] = []
    table = MetricTable.read(path, lambda _, lines: broken.append(list(lines)))
    for step, values in zip(table.steps, table.values, strict=True):
        row = dict(zip(table.names, values.tolist(), strict=True))
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        found.append({"step": float(step), **known})
    assert found == expected
    assert [row["step"] for row in found] == [0, 1, 4, 5, 6]
    assert broken == [[3, 4, 5, 8, 10]] * 2


def test_reading_continues_at_a_position(tmp_path: Path) -> None:
    path, position = tmp_path / "metrics.jsonl", Position()
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert MetricTable.read(path, position=position).steps.tolist() == [0, 1]
    with path.open("a") as file:
        file.write('ep": 2}\nbroken\n{"step": 3, "a": 1.5}\n')
    numbers: list[int] = []
    table = MetricTable.read(path, lambda _, lines: numbers.extend(lines), position)
    assert table.steps.tolist() == [2, 3]
    assert table.column("a").tolist()[1:] == [1.5]
    assert np.isnan(table.column("none")).all()
    assert numbers == [4]
    assert (position.line, position.offset) == (5, path.stat().st_size)

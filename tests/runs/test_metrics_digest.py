"""Tables and digests of metrics and of configurations equal the rows and the YAML."""

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlctl.monitoring.run_summary import RunSummary
from rlctl.recipes.compose import compose
from rlctl.runs import digests as module
from rlctl.runs import metrics_digest as digesting
from rlctl.runs.digests import METRICS, SERIES, config_digest
from rlctl.runs.index import Index
from rlctl.runs.metrics_digest import metrics_digest
from rlctl.tracking import metric_table
from rlctl.tracking.jsonl import Position, metric_rows, read_metrics
from rlctl.tracking.metric_table import metric_tables

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
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in what))


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_digest_equals_that_of_the_rows(tmp_path: Path, monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(metric_table, "_ROWS", chunk)
    path = tmp_path / "metrics.jsonl"
    append(path, rows(1, 20))
    digest = metrics_digest(path)
    assert digest["summary"] == dataclasses.asdict(RunSummary.from_rows(read_metrics(path)))
    losses = [row["loss"] for row in read_metrics(path)]
    assert dict(zip(SERIES, digest["series"]["loss"], strict=True)) == {
        "first": losses[0],
        "last": losses[-1],
        "min": min(losses),
        "max": max(losses),
        "count": 19,
    }
    assert "rare" not in digest["series"]


def test_growth_reads_only_the_new_rows(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, rows(0, 10))
    with path.open("a") as file:
        file.write('{"step": 10, "lo')
    earlier = json.loads(json.dumps(metrics_digest(path)))
    path.write_text(path.read_text().rpartition("\n")[0] + "\nbroken\n")  # the same inode
    append(path, rows(10, 20))
    read: list[int] = []
    grown = metrics_digest(path, earlier, lambda table: read.extend(table.steps.tolist()))
    assert read == list(range(10, 20))
    assert grown == metrics_digest(path)
    assert grown["problem"] == f"skipped a broken line at {path}:11"


@pytest.mark.parametrize("change", ["rewound", "shortened", "rewritten", "missing"])
def test_other_changes_read_the_file_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, rows(0, 10))
    earlier = metrics_digest(path)
    if change == "rewound":  # a new file, as a resumed run writes it
        aside = tmp_path / "aside"
        append(aside, rows(0, 5))
        aside.replace(path)
        append(path, rows(5, 30))
    elif change == "shortened":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    elif change == "rewritten":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(100, 130)))
    else:
        path.unlink()
    assert metrics_digest(path, earlier) == metrics_digest(path)


def test_index_extends_the_digest_of_a_live_run(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "p" / "r" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    starts: list[int] = []
    read = digesting.metric_tables

    def spy(path, on_broken, position):
        starts.append(position.line)
        return read(path, on_broken, position)

    monkeypatch.setattr(digesting, "metric_tables", spy)
    for end in (5, 8, 8, 9):
        append(path, rows(len(path.read_text().splitlines()) if path.exists() else 0, end))
        found = Index(tmp_path).read(METRICS, {"p/r": str(path.parent)})["p/r"]
        assert found["summary"]["step"] == end - 1
    assert starts == [0, 5, 8]
    assert found == metrics_digest(path)


def digest(folder: Path, text: str) -> dict:
    file = folder / "config.yaml"
    file.write_text(text)
    return config_digest(file)


@pytest.mark.parametrize("verb", ["ppo", "grpo", "sft"])
def test_digest_of_a_recipe_equals_that_of_the_parsed_file(verb: str, tmp_path: Path) -> None:
    given = ["trainer.tracking.description='two lines:\n  a: 1\n\nb'", "trainer.project_name='yes'"]
    text = yaml.safe_dump(compose(verb, given).recorded, sort_keys=False, allow_unicode=True)
    found = digest(tmp_path, text)
    assert found == module._parse(text)
    assert found["trainer.tracking.description"] == "two lines:\n  a: 1\n\nb"


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1, 2]\nb: *x\n",  # the reference is in another section
        "a:\n    b: 1\n    c:\n        d: 2\n",
        "---\na:\n  b: 1\n",
        "# mine\na:\n  # of b\n  b: 1  # one\n\n  c: 2\n",
        "a:\n  b: |\n    x: 1\n    y: 2\n  c: >-\n    x\n\n    y\nd: 1",
        "a:\n  'b c': 1\n  \"d\": 2\n  3: 4\n  e-f/g: 5\n",
        "a:\n  b: |2-\n      x: 1\n\n    y\n  c: 2\n",
        "a: {b: 1,\nc: 2}\nd: 3\n",
        'a: "x\ny: z"\nb: 1\n',
        "a:\n  plain text\n  of two lines\nb: 1\n",
        "a:\n- b: 1\n  c: 2\n- 3\nd: {}\ne: []\n",
        "a:\n  b: 1\na:\n  c: 2\n",
        "a:\n  b: 1\r\n  c: 2\r\n",
        "a:\n  b: 1\n  c:\n    d: 2",
        "".join(f"{'  ' * depth}a{depth}:\n" for depth in range(20)),
    ],
)
def test_digest_of_other_texts_equals_that_of_the_parsed_file(text: str, tmp_path: Path) -> None:
    assert digest(tmp_path, text) == module._parse(text)


@pytest.mark.parametrize("text", ["", "a: [1\n", "- 1\n", "text", "a: b: c\n", "\x00"])
def test_unreadable_text_has_an_empty_digest(text: str, tmp_path: Path) -> None:
    assert digest(tmp_path, text) == {}


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
    for table in metric_tables(path, lambda _, lines: broken.append(list(lines))):
        for step, values in zip(table.steps, table.values, strict=True):
            row = dict(zip(table.names, values.tolist(), strict=True))
            known = {name: value for name, value in row.items() if not math.isnan(value)}
            found.append({"step": float(step), **known})
    assert found == expected
    assert [row["step"] for row in found] == [0, 1, 4, 5, 6]
    assert broken == [[3, 4, 5, 8]] * 2


def test_reading_continues_at_a_position(tmp_path: Path) -> None:
    path, position = tmp_path / "metrics.jsonl", Position()
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [table.steps.tolist() for table in metric_tables(path, position=position)] == [[0, 1]]
    with path.open("a") as file:
        file.write('ep": 2}\nbroken\n{"step": 3, "a": 1.5}\n')
    numbers: list[int] = []
    (table,) = metric_tables(path, lambda _, lines: numbers.extend(lines), position)
    assert table.steps.tolist() == [2, 3]
    assert table.column("a").tolist()[1:] == [1.5]
    assert np.isnan(table.column("none")).all()
    assert numbers == [4]
    assert (position.line, position.offset) == (5, path.stat().st_size)


def test_long_files_are_parsed_by_arrow_with_the_same_result(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    plain = [
        {"step": step, "a": step / 3, "b": step if step % 2 else 1e300, "n": None}
        | ({"later": step, "big": 2**62} if step > 50 else {})
        for step in range(100)
    ]
    texts = [json.dumps(row) for row in plain]
    path.write_text("\n".join([*texts, *LINES, *texts]) + '\n{"step": 7, "a": 1}')

    def read(block: int) -> tuple[list[int], dict[str, list[float]], list[int], Position, int]:
        monkeypatch.setattr(metric_table, "_BLOCK", block)
        broken: list[int] = []
        position = Position()
        tables = list(metric_tables(path, lambda _, lines: broken.extend(lines), position))
        steps = [step for table in tables for step in table.steps.tolist()]
        names = ("a", "b", "n", "later", "big", "c", "d")
        columns = {name: [x for table in tables for x in table.column(name)] for name in names}
        return steps, columns, broken, position, len(tables)

    *expected, one = read(2**24)
    *found, several = read(1000)
    assert (one, several > 5) == (1, True)
    np.testing.assert_equal(found, expected)

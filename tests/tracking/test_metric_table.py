"""Metrics as arrays: the same values as row by row, whatever the lines contain."""

import json
import math
from pathlib import Path

import numpy as np

from rlctl.tracking import metric_table
from rlctl.tracking.jsonl import Position, metric_rows
from rlctl.tracking.metric_table import metric_tables

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

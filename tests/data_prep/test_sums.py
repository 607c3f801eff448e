"""Level 0 of `rlctl prep arithmetic`: sums after an example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.rows import read_rows, write_rows
from rlctl.errors import UsageError
from rlctl.runtime.rewards.same_text import score

GIVEN = ArithmeticParams(train=303, val=96, level=0)


def test_rows_are_all_sums_once_and_none_is_an_example(tmp_path: Path) -> None:
    splits = arithmetic(GIVEN)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 303, "val": 96}
    rows = [*splits["train"], *splits["val"]]
    asked = [each.prompt[-1]["content"] for each in rows]
    for question, each in zip(asked, rows, strict=True):
        first, second = map(int, re.findall(r"\d+", question))
        assert 1 <= min(first, second) <= max(first, second) <= 20
        assert each.ground_truth == each.extra_info["answer"] == str(first + second)
        assert [turn["role"] for turn in each.prompt] == ["system", "user", "assistant", "user"]
    shown = {turn["content"] for turn in rows[0].prompt[:-1]}
    assert len(set(asked)) == 399
    assert not shown & set(asked)
    write_rows(tmp_path / "rows.parquet", rows)
    assert [*read_rows(tmp_path / "rows.parquet")] == rows


def test_the_seed_decides_and_the_number_alone_is_right() -> None:
    assert arithmetic(GIVEN) == arithmetic(GIVEN)
    other = arithmetic(GIVEN.model_copy(update={"seed": 1}))
    assert other["val"] != arithmetic(GIVEN)["val"]
    row = other["val"][0]
    for text, expected in ((f" {row.ground_truth}\n", 1.0), (f"It is {row.ground_truth}.", 0.0)):
        assert score(row.data_source, text, row.ground_truth)["score"] == expected


def test_more_rows_than_sums_are_refused() -> None:
    with pytest.raises(UsageError, match="level 0 has 399 different problems, requested 400"):
        arithmetic(GIVEN.model_copy(update={"val": 97}))


def test_rows_may_be_episodes() -> None:
    [row] = arithmetic(ArithmeticParams(train=1, val=1, level=0, tools="calculator"))["train"]
    assert row.agent_name == "tool_agent"

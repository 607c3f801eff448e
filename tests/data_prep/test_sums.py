"""Level 0 of `rlctl prep arithmetic`: sums that the assistant's message begins with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.rows import read_rows, write_rows
from rlctl.errors import UsageError
from rlctl.runtime.rewards.same_text import score

GIVEN = ArithmeticParams(train=304, val=96, level=0)


def test_rows_are_all_sums_once(tmp_path: Path) -> None:
    splits = arithmetic(GIVEN)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 304, "val": 96}
    rows = [*splits["train"], *splits["val"]]
    asked = [each.prompt[-1]["content"] for each in rows]
    for question, each in zip(asked, rows, strict=True):
        first, second = map(int, re.findall(r"\d+", question))
        assert 1 <= min(first, second) <= max(first, second) <= 20
        assert each.ground_truth == each.extra_info["answer"] == str(first + second)
        assert [turn["role"] for turn in each.prompt] == ["system", "user", "assistant"]
        assert question == f"{each.prompt[1]['content']} ="
    assert len(set(asked)) == 400
    write_rows(tmp_path / "rows.parquet", rows)
    assert [*read_rows(tmp_path / "rows.parquet")] == rows


def test_the_seed_decides_and_the_number_alone_is_right() -> None:
    assert arithmetic(GIVEN) == arithmetic(GIVEN)
    other = arithmetic(GIVEN.model_copy(update={"seed": 1}))
    assert other["val"] != arithmetic(GIVEN)["val"]
    row = other["val"][0]
    truth = row.ground_truth
    for text, expected in ((f" {truth}\n", 1.0), (f"{truth}.", 1.0), (f"It is {truth}.", 0.0)):
        assert score(row.data_source, text, truth)["score"] == expected
    assert score("mine", "In Paris. ", "In Paris.") == {"score": 1.0, "pred": "In Paris."}


@pytest.mark.parametrize(("train", "val"), [(304, 97), (1, 400)])
def test_more_rows_than_sums_are_refused(train: int, val: int) -> None:
    given = GIVEN.model_copy(update={"train": train, "val": val})
    with pytest.raises(UsageError, match="level 0 has 400 different problems, requested 401"):
        arithmetic(given)


def test_rows_may_be_episodes() -> None:
    [row] = arithmetic(ArithmeticParams(train=1, val=1, level=0, tools="calculator"))["train"]
    assert row.agent_name == "tool_agent"

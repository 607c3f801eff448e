"""Tests of data sets from a user's own records."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.jsonl import Fields, rows_from_records, split_off
from rlctl.data_prep.lengths import Lengths, drop_overlong
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, NotFoundError, UsageError

PLAIN = Fields(prompt_key="q", answer_key="a", data_source="mine", system=None, instruction=None)


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_prompts_may_be_texts_or_chats(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write(tmp_path / "x.jsonl", {"q": "2 + 2?", "a": 4}, {"q": chat, "a": ["4", "four"]})
    assert list(rows_from_records(path, PLAIN)) == [
        PromptRow(
            "mine",
            [{"role": "user", "content": "2 + 2?"}],
            "4",
            extra_info={"index": 0, "question": "2 + 2?"},
        ),
        PromptRow("mine", chat, ["4", "four"], extra_info={"index": 1}),
    ]


def test_system_instruction_and_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"q": {"text": "2 + 2?"}, "meta.a": "4"}]))
    (row,) = rows_from_records(
        path, Fields("q.text", "meta.a", "mine", "Be brief.", "End with ####.")
    )
    assert row.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2? End with ####."},
    ]
    assert row.ground_truth == "4"
    assert row.extra_info == {"index": 0, "question": "2 + 2?"}


def test_bad_records_are_reported_by_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"q": "x", "a": "1"},
        {"question": "x", "a": 1},
        3,
        {"q": " ", "a": 1},
        {"q": "x", "a": None},
        {"q": [{}], "a": 1},
    )
    with pytest.raises(ConfigError) as caught:
        list(rows_from_records(path, PLAIN))
    assert [(problem.message, problem.where) for problem in caught.value.problems] == [
        ("no key 'q'; keys: question, a", f"{path}:2"),
        ("the record is int, expected an object", f"{path}:3"),
        ("'q' is ' ', expected a non-empty text or list of {role, content}", f"{path}:4"),
        ("'a' is null", f"{path}:5"),
        ("'q' is [{}], expected a non-empty text or list of {role, content}", f"{path}:6"),
    ]
    with pytest.raises(NotFoundError):
        list(rows_from_records(tmp_path / "none.jsonl", PLAIN))
    (tmp_path / "y.json").write_text('{"q": 1}')
    with pytest.raises(ConfigError, match="contains dict, expected a list"):
        list(rows_from_records(tmp_path / "y.json", PLAIN))
    (tmp_path / "y.json").write_text("[\n1,\n")
    with pytest.raises(ConfigError, match=r"y\.json:3"):
        list(rows_from_records(tmp_path / "y.json", PLAIN))


def numbered(count: int) -> list[PromptRow]:
    return [
        PromptRow("s", [{"role": "user", "content": "x" * i}], "1", extra_info={"index": i})
        for i in range(count)
    ]


def test_splits_are_disjoint_complete_and_seeded() -> None:
    splits = split_off(numbered(100), 0.2, seed=1)
    indices = {name: [row.extra_info["index"] for row in rows] for name, rows in splits.items()}
    assert len(indices["val"]) == 20
    assert sorted(indices["train"] + indices["val"]) == list(range(100))
    assert indices["train"] == sorted(indices["train"])
    assert all(row.extra_info["split"] == name for name, rows in splits.items() for row in rows)
    assert split_off(numbered(100), 0.2, seed=1) == splits
    assert split_off(numbered(100), 0.2, seed=2) != splits
    assert list(split_off(numbered(3), 0.0, seed=1)) == ["train"]
    for count, fraction in ((3, 0.1), (3, 0.9), (3, 1.0), (3, -0.1)):
        with pytest.raises(UsageError):
            split_off(numbered(count), fraction, seed=1)


def test_overlong_prompts_are_dropped_and_counted() -> None:
    kept, lengths = drop_overlong(numbered(31), lambda chat: len(chat[0]["content"]), limit=24)
    assert [row.extra_info["index"] for row in kept] == list(range(25))
    assert lengths.num_dropped == 6
    assert (lengths.quantile(0), lengths.quantile(0.5), lengths.quantile(1)) == (0, 15, 30)
    assert (
        drop_overlong(numbered(31), lambda chat: len(chat[0]["content"]), limit=None)[1].num_dropped
        == 0
    )


@pytest.mark.parametrize(
    "values", [[5], [5, 5, 5], list(range(7)), list(range(100)), [1, 1000], [3, 3, 14]]
)
def test_histogram_counts_each_length_once(values: list[int]) -> None:
    bins = Lengths(values, None).histogram()
    assert sum(count for *_, count in bins) == len(values)
    assert len(bins) <= 10
    assert bins[0][0] == values[0]
    assert bins[-1][0] <= values[-1] <= bins[-1][1]
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(bins))

"""Tests of data sets from a user's own records."""

from __future__ import annotations

import json
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.chat_records import FORMS
from rlctl.data_prep.lengths import Lengths
from rlctl.data_prep.question_records import (
    Fields,
    JsonlParams,
    jsonl,
    rows_from_records,
    split_source,
)
from rlctl.data_prep.records import read_records
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError, UsageError

PLAIN = Fields(prompt_key="q", answer_key="a", data_source="mine", system=None, instruction=None)


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_prompts_may_be_texts_or_chats(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write(tmp_path / "x.jsonl", {"q": "2 + 2?", "a": 4}, {"q": chat, "a": ["4", "four"]})
    assert list(rows_from_records([path], PLAIN)) == [
        PromptRow(
            "mine",
            [{"role": "user", "content": "2 + 2?"}],
            "4",
            extra_info={"index": 0, "question": "2 + 2?"},
        ),
        PromptRow("mine", chat, ["4", "four"], extra_info={"index": 1}),
    ]


def test_the_last_response_of_a_chat_is_the_answer(tmp_path: Path) -> None:
    openai = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    sharegpt = [
        {"from": name, "value": each["content"]}
        for name, each in zip(("system", "human", "gpt"), openai, strict=True)
    ]
    path = write(tmp_path / "x.jsonl", {"q": openai, "id": 7}, {"q": sharegpt, "id": 8})
    for key in (None, "q"):
        fields = Fields("q", key, "mine", None, None)
        for number, row in enumerate(rows_from_records([path], fields)):
            assert (row.prompt, row.ground_truth) == (openai[:2], "a")
            assert row.extra_info == {"index": number, "answer": "a", "id": 7 + number}
    path = write(tmp_path / "y.jsonl", {"q": openai, "a": "7"})
    (row,) = rows_from_records([path], PLAIN)
    assert (row.prompt, row.ground_truth, row.extra_info["answer"]) == (openai[:2], "7", "a")
    completion = [{"role": "assistant", "content": "x"}]
    path = write(tmp_path / "y.jsonl", {"q": "2 + 2?", "a": completion})
    assert next(rows_from_records([path], PLAIN)).ground_truth == "x"
    path = write(
        tmp_path / "z.jsonl",
        {"q": openai[:2]},
        {"q": [{"from": "gpt", "value": "a"}]},
        {"q": "text"},
        {"q": [{"role": "user", "content": [{"type": "image"}]}]},
        {"q": [{"speaker": "human", "text": "a" * 90}]},
    )
    with pytest.raises(ConfigError) as caught:
        list(rows_from_records([path], Fields("q", None, "mine", None, None)))
    assert [problem.message for problem in caught.value.problems] == [
        "'q' has no message of the assistant, which would be the answer",
        "'q' has no message of a user before the assistant's",
        "'q' is a text: name the answers with --answer-key",
        "'q', message 0 has 'content' [{'type': 'image'}], expected a text",
        f"'q' is [{{'speaker': 'human', 'text': '{'a' * 28}…, expected a non-empty text or {FORMS}",
    ]


def test_other_columns_are_kept(tmp_path: Path) -> None:
    record = {"q": "2 + 2?", "a": "4", "level": 3, "split": "x", "index": "b", "tags": ["t"]}
    path = write(tmp_path / "x.jsonl", record, record | {"level": None, "extra_info": {"topic": 1}})
    splits = jsonl(JsonlParams(files=[str(path)], prompt_key="q", answer_key="a"))
    write_rows(tmp_path / "x.parquet", splits["train"])
    first, second = (row.extra_info for row in read_rows(tmp_path / "x.parquet"))
    own = {"index": 0, "split": "train", "question": "2 + 2?"}
    assert first == {**own, "level": 3, "tags": ["t"]}
    assert second == {**own, "index": 1, "level": None, "tags": ["t"], "topic": 1}
    table = {"q": ["1"], "a": [1], "day": [date(2026, 1, 2)], "raw": [b"123"]}
    pq.write_table(pa.table(table), tmp_path / "y.parquet")
    (row,) = rows_from_records([tmp_path / "y.parquet"], PLAIN)
    assert (row.extra_info["day"], row.extra_info["raw"]) == ("2026-01-02", "<3 bytes>")


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    for name in ("part-0", "part-1"):
        write(tmp_path / f"{name}.jsonl", {"q": name, "a": 1})
    for files in (["part-*.jsonl"], ["part-0.jsonl", "part-1.jsonl"]):
        params = JsonlParams(
            files=[str(tmp_path / each) for each in files], prompt_key="q", answer_key="a"
        )
        rows = list(jsonl(params)["train"])
        assert [row.prompt[0]["content"] for row in rows] == ["part-0", "part-1"]
        assert [row.extra_info["index"] for row in rows] == [0, 1]
        assert {row.data_source for row in rows} == {"part"}


def test_text_that_cannot_be_stored_is_reported_by_line(tmp_path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    for name, places in (("x.jsonl", (":2", ":3", ":4")), ("x.json", (" 1", " 2", ""))):
        lines = [
            '{"q": "\\ud83d\\ude00"}',
            '{"q": "\\ud83d"}',
            '{"q": ' + "[" * 200 + "]" * 200 + "}",
        ]
        lines += [f'{{"q": {deep}}}'] if name == "x.jsonl" else []
        text = "\n".join(lines) if name == "x.jsonl" else f"[{','.join(lines)}]"
        (tmp_path / name).write_text(text)
        found = []
        with pytest.raises(ConfigError) as caught:
            found.extend(each for _, each in read_records(tmp_path / name))
        assert found == [{"q": "\U0001f600"}]
        problems = caught.value.problems
        assert "half of a surrogate pair, \\ud83d" in problems[0].message
        assert "nested more than 100 deep" in problems[1].message
        for problem, place in zip(problems, places, strict=False):
            assert (problem.where or "").endswith(place)
    (tmp_path / "y.json").write_text(deep)
    with pytest.raises(ConfigError, match="nested more than 100 deep"):
        list(read_records(tmp_path / "y.json"))


def test_rows_of_wrong_types_are_one_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", [PromptRow("s", "text", "1")])  # type: ignore[arg-type]
    (row,) = read_rows(tmp_path / "x.parquet")
    assert row.prompt == [{"role": "user", "content": "text"}]
    for prompt in (7, [{"role": "user", "content": "\ud83d"}]):
        wrong: Any = prompt
        with pytest.raises(ConfigError, match="a row cannot be stored"):
            write_rows(tmp_path / "y.parquet", [PromptRow("s", wrong, "1")])
    large = PromptRow("s", [{"role": "user", "content": "q"}], "1", extra_info={"n": 2**70})
    write_rows(tmp_path / "z.parquet", [large])
    assert read_rows(tmp_path / "z.parquet") == [large]


def test_system_instruction_and_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"q": {"text": "2 + 2?"}, "meta.a": "4"}]))
    (row,) = rows_from_records(
        [path], Fields("q.text", "meta.a", "mine", "Be brief.", "End with ####.")
    )
    assert row.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2? End with ####."},
    ]
    assert row.ground_truth == "4"
    assert row.extra_info == {"index": 0, "question": "2 + 2?", "q": {"text": "2 + 2?"}}


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
        list(rows_from_records([path], PLAIN))
    assert [(problem.message, problem.where) for problem in caught.value.problems] == [
        ("no key 'q'; keys: question, a", f"{path}:2"),
        ("the record is int, expected an object", f"{path}:3"),
        (f"'q' is ' ', expected a non-empty text or {FORMS}", f"{path}:4"),
        ("'a' is null", f"{path}:5"),
        (f"'q' is [{{}}], expected a non-empty text or {FORMS}", f"{path}:6"),
    ]
    (tmp_path / "y.json").write_text('{"q": 1}')
    with pytest.raises(ConfigError, match="contains dict, expected a list"):
        list(rows_from_records([tmp_path / "y.json"], PLAIN))
    (tmp_path / "y.json").write_text("[\n1,\n")
    with pytest.raises(ConfigError, match=r"y\.json:3"):
        list(rows_from_records([tmp_path / "y.json"], PLAIN))


def numbered(count: int) -> list[PromptRow]:
    return [
        PromptRow("s", [{"role": "user", "content": "x" * i}], "1", extra_info={"index": i})
        for i in range(count)
    ]


def split(count: int, fraction: float, seed: int) -> dict[str, list[PromptRow]]:
    rows = numbered(count)
    splits = split_source(lambda: iter(rows), fraction, seed, count)
    return {name: list(own) for name, own in splits.items()}


def test_splits_are_disjoint_complete_and_seeded() -> None:
    splits = split(100, 0.2, seed=1)
    indices = {name: [row.extra_info["index"] for row in rows] for name, rows in splits.items()}
    assert len(indices["val"]) == 20
    assert sorted(indices["train"] + indices["val"]) == list(range(100))
    assert indices["train"] == sorted(indices["train"])
    assert all(row.extra_info["split"] == name for name, rows in splits.items() for row in rows)
    assert split(100, 0.2, seed=1) == splits
    assert split(100, 0.2, seed=2) != splits
    assert list(split(3, 0.0, seed=1)) == ["train"]
    for count, fraction in ((3, 0.1), (3, 0.9), (3, 1.0), (3, -0.1)):
        with pytest.raises(UsageError):
            split(count, fraction, seed=1)


def test_equal_records_are_in_one_split(tmp_path: Path) -> None:
    records = [{"q": f"{i % 40} + 1?", "a": i % 40 + 1, "id": i} for i in range(100)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields = {"prompt_key": "q", "answer_key": "a", "val_fraction": 0.3}
    splits = jsonl(JsonlParams(files=[str(tmp_path / "x.jsonl")], **fields))
    train, val = ({row.prompt[0]["content"] for row in splits[name]} for name in ("train", "val"))
    assert not train & val
    assert len(train | val) == 40
    assert len(splits["train"]) + len(splits["val"]) == 100
    assert 10 <= len(splits["val"]) <= 50
    assert len(list(splits["val"])) == len(splits["val"])


def test_records_that_are_all_equal_are_divided_all_the_same() -> None:
    rows = [PromptRow("s", [], "1", extra_info={"index": i}) for i in range(10)]
    splits = split_source(lambda: iter(rows), 0.2, 0, 10)
    assert len(splits["val"]) == 2


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

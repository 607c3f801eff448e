"""Tests of the data contract: round trips, and reports of all problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep import question_records as jsonl_module
from rlctl.data_prep import row_columns
from rlctl.data_prep.lengths import drop_overlong
from rlctl.data_prep.question_records import JsonlParams, rows_from_records
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError, ResourceError

CHAT = [
    {"role": "system", "content": "Kurz."},
    {"role": "user", "content": "2 + 2? \U0001f642\u2028 ok"},
]
GOOD = {"data_source": "s", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}}


def row(extra_info: dict[str, Any] | None = None, truth: Any = "4") -> PromptRow:
    return PromptRow(
        "s", CHAT, truth, "math", "rule", extra_info if extra_info is not None else {"index": 1}
    )


def problems(path: Path, **keys: str) -> list[tuple[str, str | None]]:
    with pytest.raises(ConfigError) as caught:
        read_rows(path, **keys)
    return [(problem.message, problem.where) for problem in caught.value.problems]


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    "rows",
    [
        [row({"split": "train", "index": i, "answer": "4"}) for i in range(3)],
        [row({"index": 1}), row({"index": "one"})],  # another type
        [row({"a": 1}), row({"b": 2})],  # other keys: a struct would add both keys to both rows
        [row({"a": None}), row({"a": 2})],
        [row({"deep": {"list": [1, 2], "empty": {}}}), row({"deep": {"list": []}})],
        [row({}), row({"a": 1})],
        [row({"mixed": [1, "a"]})],
        [row(truth="4"), row(truth=["4", "four"])],
        [row(truth={"input": "1 2", "output": "3"})],
        [row(truth=4), row(truth=4.5)],
    ],
)
def test_round_trip(tmp_path: Path, rows: list[PromptRow]) -> None:
    write_rows(tmp_path / "new" / "x.parquet", rows)
    assert read_rows(tmp_path / "new" / "x.parquet") == rows
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.parquet"]


def test_columns_are_those_of_verl(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", [row({"split": "train", "index": 0})])
    (record,) = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert record == {
        "data_source": "s",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }


def test_files_of_verl_and_others_are_read(tmp_path: Path) -> None:
    columns = {
        "data_source": pa.array(["s", "s"]).dictionary_encode(),
        "prompt": pa.array(
            [CHAT, CHAT],
            pa.large_list(pa.struct([("content", pa.large_string()), ("role", pa.string())])),
        ),
        "reward_model": [{"ground_truth": "4", "style": "model"}] * 2,
        "agent_name": ["a", "b"],
    }
    assert read_rows(write(tmp_path / "x.parquet", columns)) == [
        PromptRow("s", CHAT, "4", style="model", agent_name=name) for name in "ab"
    ]
    columns |= {"question": columns.pop("prompt"), "kind": columns.pop("data_source")}
    assert (
        len(
            read_rows(
                write(tmp_path / "y.parquet", columns), prompt_key="question", reward_fn_key="kind"
            )
        )
        == 2
    )


def test_jsonl_of_the_same_shape(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({**GOOD, "extra_info": {"i": i}}, ensure_ascii=False) for i in range(2)
        )
        + "\n\n"
    )
    assert read_rows(path) == [PromptRow("s", CHAT, "4", extra_info={"i": i}) for i in range(2)]


def test_missing_file_raises(tmp_path: Path) -> None:
    assert problems(tmp_path / "train.parquet") == [
        ("the data file does not exist", str(tmp_path / "train.parquet"))
    ]
    assert problems(tmp_path) == [("the data file is a folder", str(tmp_path))]
    write_rows(tmp_path / "training.parquet", [row()])
    with pytest.raises(ConfigError, match=r"training\.parquet"):
        read_rows(tmp_path / "train.parquet")


def test_the_files_of_a_folder_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in ("data/val", "data/train", "data2"):
        write_rows(tmp_path / f"{name}.parquet", [row()])
    with pytest.raises(ConfigError) as caught:
        read_rows(folder)
    (problem,) = caught.value.problems
    assert problem.hint == (f"data files in {folder}: {folder}/train.parquet, {folder}/val.parquet")
    assert problem.fix is None


def test_invalid_parquet_raises(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("question,answer\n")
    assert "not a readable parquet file" in problems(path)[0][0]
    complete = tmp_path / "complete.parquet"
    write_rows(complete, [row()] * 100)
    path.write_bytes(complete.read_bytes()[:-20])
    assert "not a readable parquet file" in problems(path)[0][0]
    path.write_bytes(b"")
    assert "not a readable parquet file" in problems(path)[0][0]


def test_all_wrong_columns_are_reported_at_once(tmp_path: Path) -> None:
    columns = {"prompt": [5], "data_source": [3], "extra_info": [[1]]}
    path = write(tmp_path / "x.parquet", columns)
    assert problems(path) == [
        (
            "no column 'reward_model' (struct<style: string, ground_truth: ...>); "
            "columns: prompt, data_source, extra_info",
            f"{path}, column reward_model",
        ),
    ]
    path = write(tmp_path / "y.parquet", {**columns, "reward_model": [{"ground_truth": "4"}]})
    assert problems(path) == [
        ("column 'data_source' is 3, expected a non-empty text", f"{path}, row 0"),
        (
            "column 'prompt' is 5, expected a non-empty list of {role, content}",
            f"{path}, row 0",
        ),
        (
            "column 'extra_info' is [1], expected an object or its JSON text",
            f"{path}, row 0",
        ),
    ]


def test_prompts_without_text_are_reported(tmp_path: Path) -> None:
    """Texts and chats; text in one message is enough."""
    system = {"role": "system", "content": "Be brief."}
    prompts = [CHAT, [{"role": "user", "content": ""}], [{"role": "user", "content": " \n"}]]
    prompts.append([system, {"role": "user", "content": ""}])
    truth = {"style": "rule", "ground_truth": "4"}
    rows = [{"data_source": "s", "prompt": each, "reward_model": truth} for each in prompts]
    columns = {key: [each[key] for each in rows] for key in rows[0]}
    parquet = write(tmp_path / "x.parquet", columns)
    assert problems(parquet) == [
        ("column 'prompt' has no text", f"{parquet}, row {number}") for number in (1, 2)
    ]
    lines = tmp_path / "x.jsonl"
    rows[0]["prompt"] = "  "
    lines.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    assert [where for _, where in problems(lines)] == [f"{lines}:{n}" for n in (1, 2, 3)]


def test_bad_rows_are_reported_by_number(tmp_path: Path) -> None:
    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    columns = {
        "data_source": ["s", None, "s", "s"],
        "prompt": pa.array([CHAT, CHAT, [], [{"role": "user", "content": None}]], chat),
        "reward_model": [
            {"ground_truth": "4"},
            {"ground_truth": "4"},
            {"ground_truth": "4"},
            {"ground_truth": None},
        ],
    }
    path = write(tmp_path / "x.parquet", columns)
    assert problems(path) == [
        ("column 'data_source' is None, expected a non-empty text", f"{path}, row 1"),
        (
            "column 'prompt' is [], expected a non-empty list of {role, content}",
            f"{path}, row 2",
        ),
        (
            "column 'prompt', message 0 is {'role': 'user', 'content': None}, "
            "expected {role, content}, both text",
            f"{path}, row 3",
        ),
        (
            "column 'reward_model' is {'ground_truth': None}, "
            "expected {style, ground_truth} with a ground_truth that is not null",
            f"{path}, row 3",
        ),
    ]


def test_bad_jsonl_lines_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"data_source": \n')
    assert problems(path) == [("not JSON: Expecting value (column 17)", f"{path}:2")]
    path.write_text(json.dumps(GOOD) + "\n3\n" + json.dumps({**GOOD, "extra_info": "x"}))
    assert [where for _, where in problems(path)] == [f"{path}:2", f"{path}:3"]
    path.write_text("".join('{"data_source": ' + " " * n + "\n" for n in range(100)))
    found = problems(path)
    assert len(found) == 11
    assert found[-1] == ("and 90 more problems of this file", str(path))


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: pq.ParquetWriter, table: pa.Table) -> None:
        raise OSError(28, "No space left on device")

    write_rows(tmp_path / "x.parquet", [row()])
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(ResourceError, match="No space left on device"):
        write_rows(tmp_path / "x.parquet", [row(), row()])
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]
    assert len(read_rows(tmp_path / "x.parquet")) == 1  # the old file is complete


def test_a_json_list_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    (tmp_path / "list.json").write_text(json.dumps([row, row]))
    (tmp_path / "excel.jsonl").write_text("\ufeff" + json.dumps(row))
    assert len(read_rows(tmp_path / "list.json")) == 2
    assert read_rows(tmp_path / "excel.jsonl")[0].ground_truth == "2"


@pytest.mark.parametrize(
    ("truths", "infos"),
    [
        ([1, 2, 3, 4, 5], [{"a": None}, {"a": None}, {"a": "x"}, {"a": None}, {"a": "y"}]),
        ([1, 2, 2.5, 3, 4], [{"a": 1}, {"a": 2}, {"b": 3}, {"b": 4}, {"b": 5}]),
        ([2**60, 1, 0.5, 0.25, 1], [{"a": [1]}, {"a": []}, {"a": ["x"]}, {"a": []}, {"a": []}]),
    ],
)
def test_parts_of_a_file_have_one_schema(
    truths: list[Any], infos: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(info, truth) for truth, info in zip(truths, infos, strict=True)]
    monkeypatch.setattr(row_columns, "_TABLE_ROWS", 2)
    write_rows(tmp_path / "x.parquet", rows)
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 3
    assert read_rows(tmp_path / "x.parquet") == rows


def test_rows_that_are_streamed_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n' * 500)
    monkeypatch.setattr(row_columns, "_TABLE_ROWS", 20)
    alive: WeakValueDictionary[int, PromptRow] = WeakValueDictionary()
    most = 0

    def watched(*arguments: Any) -> Iterator[PromptRow]:
        nonlocal most
        for row in rows_from_records(*arguments):
            alive[id(row)] = row
            most = max(most, len(alive))
            yield row

    monkeypatch.setattr(jsonl_module, "rows_from_records", watched)
    files = [str(tmp_path / "x.jsonl")]
    params = JsonlParams(files=files, prompt_key="q", answer_key="a", val_fraction=0.1)
    for name, split in jsonl_module.jsonl(params).items():
        kept, lengths = drop_overlong(split, lambda row: len(row.prompt[0]["content"]), 5)
        write_rows(tmp_path / f"{name}.parquet", kept)
        found = read_rows(tmp_path / f"{name}.parquet")
        assert len(found) == len(split) == len(kept) == len(lengths.values)
        assert {each.extra_info["split"] for each in found} == {name}
    assert most <= 50


def test_extra_info_that_is_text_is_json_or_a_fault(tmp_path: Path) -> None:
    columns = {name: [value] * 3 for name, value in GOOD.items()}
    texts = ['{"a": 1}', "", '{"a": 2}']
    path = write(tmp_path / "x.parquet", columns | {"extra_info": texts})
    assert [each.extra_info for each in read_rows(path)] == [{"a": 1}, {}, {"a": 2}]
    texts[1:] = ["no JSON", '"text"']
    path = write(tmp_path / "y.parquet", columns | {"extra_info": texts})
    expected = "expected an object or its JSON text"
    assert problems(path) == [
        (f"column 'extra_info' is 'no JSON', {expected}", f"{path}, row 1"),
        (f"column 'extra_info' is 'text', {expected}", f"{path}, row 2"),
    ]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_skyrl_keep_all_columns(tmp_path: Path, suffix: str) -> None:
    spec = {"method": "rule", "ground_truth": "4"}
    own = {"env_class": "sql", "db_id": "d", "reward_spec": spec}
    record = {"data_source": "s", "prompt": CHAT, "extra_info": {"index": 1}, **own}
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        write(path, {name: [value] for name, value in record.items()})
    else:
        path.write_text(json.dumps(record))
    (found,) = read_rows(path)
    assert (found.ground_truth, found.style) == ("4", "rule")
    assert found.extra_info == {"index": 1, **own, "reward_model": {**spec, "style": "rule"}}


def test_a_file_of_chats_names_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "my chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    assert caught.value.problems[0].hint == (
        "data.reader=chats (sft), or convert it: "
        f"rlctl prep jsonl '{path}' --prompt-key messages --out data/mine"
    )

"""Check of all rows before a start: the same faults, whatever the layout of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep import row_fields
from rlctl.data_prep.row_fields import RowField
from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.data.row_checks import RowFaults, check_fields, empty_truths
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.planning.plan import make_plan
from tests.configs import configured
from tests.plugin_folders import of_recipes

FIELD = RowField("extra_info.answer", "data.response_key")
QUESTION = [{"role": "user", "content": "Tom has 3 apples. He buys 5 more. How many?"}]


def record(answer: Any, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "rlctl/arithmetic",
        "prompt": QUESTION,
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"answer": answer, **extra},
    }


def plain(path: Path, records: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path)


def as_json_text(path: Path, records: list[dict[str, Any]]) -> None:
    texts = [{**row, "extra_info": json.dumps(row["extra_info"])} for row in records]
    pq.write_table(pa.Table.from_pylist(texts), path)


def as_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def with_text_type(kind: pa.DataType) -> Callable[[Path, list[dict[str, Any]]], None]:
    def write(path: Path, records: list[dict[str, Any]]) -> None:
        table = pa.Table.from_pylist([{**row, "extra_info": None} for row in records])
        answers = pa.array([row["extra_info"]["answer"] for row in records], pa.string())
        structs = pa.StructArray.from_arrays([answers.cast(kind)], ["answer"])
        pq.write_table(table.set_column(3, "extra_info", structs), path)

    return write


def loaded(path: Path) -> Rows:
    return Rows.load(path, configured("ppo", (), ()).data)


WRITERS = {
    "plain.parquet": plain,
    "json.parquet": as_json_text,
    "lines.jsonl": as_lines,
    "large.parquet": with_text_type(pa.large_string()),
    "dictionary.parquet": with_text_type(pa.dictionary(pa.int32(), pa.string())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_faults_do_not_depend_on_the_layout(tmp_path: Path, name: str) -> None:
    chat = json.dumps([{"role": "user", "content": "what?"}])
    answers = ["8", None, " ", "8", None, chat, "[8]"]
    WRITERS[name](tmp_path / name, [record(answer) for answer in answers])
    found = RowFaults.find(loaded(tmp_path / name), [FIELD])
    assert found.counts() == {
        "extra_info.answer is null": 2,
        "extra_info.answer is empty": 1,
        "extra_info.answer does not end with the assistant": 1,
    }
    assert [bool(number) for number in found.numbers] == [0, 1, 1, 0, 1, 1, 0]


def test_columns_of_texts_are_checked_without_decoding_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path / "x.parquet", [record("8"), record("9")])
    rows = loaded(tmp_path / "x.parquet")
    monkeypatch.setattr(row_fields, "read_field", None)
    check_fields(rows, [FIELD])


def test_errors_name_file_and_row(tmp_path: Path) -> None:
    blank = "\n\n"
    lines = [record("8"), record(None), record("8"), record("")]
    (tmp_path / "x.jsonl").write_text(blank + "\n\n".join(map(json.dumps, lines)))
    plain(tmp_path / "x.parquet", [record("8"), *[record(None)] * 5])
    rows = Rows.concat([loaded(tmp_path / "x.parquet"), loaded(tmp_path / "x.jsonl")])
    with pytest.raises(ConfigError) as caught:
        check_fields(rows, [FIELD])
    assert [problem.where for problem in caught.value.problems] == [
        f"{tmp_path}/x.parquet, row 1 and 5 more rows",
        f"{tmp_path}/x.jsonl:9",
    ]


def problems(tmp_path: Path, recipe: str, *settings: str) -> list[tuple[str, str | None]]:
    files = [f"data.{split}_files={tmp_path}/x.parquet" for split in ("train", "val")]
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    with pytest.raises(ConfigError) as caught:
        make_plan(compose(recipe, [*files, *sizes, *settings]), inline=True)
    return [(problem.message, problem.where) for problem in caught.value.problems]


@pytest.mark.parametrize("recipe", of_recipes(["sft", "self_distill"]))
def test_null_solutions_are_refused_before_the_start(tmp_path: Path, recipe: str) -> None:
    plain(tmp_path / "x.parquet", [record("8"), record(None), record("8")])
    assert problems(tmp_path, recipe) == [
        ("'extra_info.answer' is null (data.response_key)", f"{tmp_path}/x.parquet, row 1")
    ]


@pytest.mark.plugin("objectives")
def test_pairs_without_a_text_are_refused_before_the_start(tmp_path: Path) -> None:
    pairs = [record("", chosen="8", rejected="9")] * 2
    pairs.append(record("", chosen="8", rejected=None))
    plain(tmp_path / "x.parquet", pairs)
    expected = ("'extra_info.rejected' is null (data.rejected_key)", f"{tmp_path}/x.parquet, row 2")
    assert problems(tmp_path, "dpo") == [expected]
    assert expected in problems(tmp_path, "rm", "reward.reward_model.ppo_mini_batch_size=2")


@pytest.mark.plugin("objectives")
def test_a_margin_that_is_no_number_is_refused_before_the_start(tmp_path: Path) -> None:
    pairs = [record("", chosen="8", rejected="9", margin=value) for value in (0.5, None)]
    plain(tmp_path / "x.parquet", pairs)
    found = problems(tmp_path, "rm", "algorithm.params.margin=true")
    assert (
        "'extra_info.margin' is null (algorithm.params.margin)",
        f"{tmp_path}/x.parquet, row 1",
    ) in found


@pytest.mark.plugin("objectives")
def test_chats_are_trained_on_as_their_last_message(tmp_path: Path) -> None:
    chats = [
        {
            "chosen": [*QUESTION, {"role": "assistant", "content": "#### 8"}],
            "rejected": [{"role": "assistant", "content": "#### 9"}],
        }
    ]
    plain(tmp_path / "x.parquet", [record("", **chats[0])] * 2)
    settings = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    files = [f"data.{split}_files={tmp_path}/x.parquet" for split in ("train", "val")]
    plan = make_plan(compose("dpo", [*files, *settings]), inline=True)
    scored = plan.algorithm.collect(plan.loader.batch_at(1), cast(Any, None), 1)
    texts = plan.tokenizer.batch_decode(
        [ids.tolist() for ids in scored.response_ids.rows()], skip_special_tokens=True
    )
    assert texts == ["#### 8", "#### 9"] * 2


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_some_empty_truths_are_reported(tmp_path: Path, name: str) -> None:
    def warnings(*truths: Any) -> list[str]:
        specs = [{"style": "rule", "ground_truth": truth} for truth in truths]
        records = [record("8") | {"reward_model": spec} for spec in specs]
        (as_lines if name.endswith("jsonl") else plain)(tmp_path / name, records)
        return list(empty_truths(loaded(tmp_path / name)))

    assert warnings("8", "9") == []
    assert warnings("", "") == []
    (found,) = warnings("8", " ", "9", "")
    place = "x.jsonl:2" if name.endswith("jsonl") else "x.parquet, row 1"
    assert f"of 2 of 4 training rows is empty, first in {tmp_path}/{place}:" in found
    assert "of 1 of 2 training rows is NaN" in warnings(8.0, float("nan"))[0]

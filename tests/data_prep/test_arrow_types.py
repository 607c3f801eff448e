"""Maps, repeated names and JSON text in the columns of data files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.records import read_records
from rlctl.data_prep.rows import read_rows
from rlctl.errors import ConfigError
from rlctl.runtime.data.row_table import Rows
from tests.configs import configured

CHAT = [{"role": "user", "content": "2 + 2?"}]
MAP = pa.map_(pa.string(), pa.string())


def table(**columns: pa.Array) -> pa.Table:
    good = {
        "data_source": pa.array(["s", "s"]),
        "prompt": pa.array([CHAT, CHAT]),
        "reward_model": pa.array([{"style": "rule", "ground_truth": "4"}] * 2),
    }
    return pa.table(good | columns)


def test_maps_are_objects(tmp_path: Path) -> None:
    message = pa.list_(MAP)
    spec = [[("style", "rule"), ("ground_truth", "4")]] * 2
    nested = pa.struct([("tags", MAP), ("all", pa.list_(MAP))])
    columns = {
        "prompt": pa.array([[list(turn.items()) for turn in CHAT]] * 2, message),
        "reward_model": pa.array(spec, MAP),
        "extra_info": pa.array([{"tags": [("a", "1")], "all": [[("b", "2")]]}, None], nested),
    }
    pq.write_table(table(**columns), tmp_path / "x.parquet")
    first, second = read_rows(tmp_path / "x.parquet")
    assert (first.prompt, first.ground_truth) == (CHAT, "4")
    assert first.extra_info == {"tags": {"a": "1"}, "all": [{"b": "2"}]}
    assert second.extra_info == {}
    rows = Rows.load(tmp_path / "x.parquet", configured("ppo", (), ()).data)
    assert list(rows) == [first, second]


def test_names_that_occur_twice_are_refused(tmp_path: Path) -> None:
    doubled = table().append_column("data_source", pa.array(["t", "t"]))
    pq.write_table(doubled, tmp_path / "x.parquet")
    fields = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["a", "a"])
    pq.write_table(table(extra_info=fields), tmp_path / "y.parquet")
    with pa.ipc.new_stream(str(tmp_path / "z.arrow"), doubled.schema) as stream:
        stream.write_table(doubled)
    for name, message in (
        ("x.parquet", "two columns are named 'data_source'"),
        ("y.parquet", "two fields are named 'a'"),
        ("z.arrow", "two columns are named 'data_source'"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(read_records(tmp_path / name))
        if name != "z.arrow":
            with pytest.raises(ConfigError, match=message):
                read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_a_prompt_that_is_the_json_text_of_a_chat_is_read_as_one(tmp_path: Path, name: str) -> None:
    texts: list[Any] = [json.dumps(CHAT), "[1] 2 + 2?"]
    if name.endswith("parquet"):
        pq.write_table(table(prompt=pa.array(texts)), tmp_path / name)
    else:
        reward = {"style": "rule", "ground_truth": "4"}
        rows = [{"data_source": "s", "prompt": text, "reward_model": reward} for text in texts]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    first, second = read_rows(tmp_path / name)
    assert first.prompt == CHAT
    assert second.prompt == [{"role": "user", "content": "[1] 2 + 2?"}]

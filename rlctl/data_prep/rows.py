"""Data contract: fields of a prompt row, and its parquet and JSONL files.

    data_source   string
    prompt        list<struct<role: string, content: string>>
    ability       string                                          (may be missing)
    reward_model  struct<style: string, ground_truth: anything>
    extra_info    struct of anything                              (may be missing)

The columns are verl's, so its files can be read unchanged. An Arrow column has one type: if rows
differ in the keys or types of `extra_info` or `ground_truth`, the column is written as JSON text
and named in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.data_prep.agent_columns import AGENT_COLUMNS, agent_name, with_agent_columns
from rlctl.data_prep.contract import CONTRACT_HINT, prompt_of, row_faults, schema_problems
from rlctl.data_prep.records import raise_capped, read_records
from rlctl.data_prep.unsupported_columns import CHECKED, column_problems
from rlctl.errors import ConfigError, Problem, ResourceError
from rlctl.files import replacing
from rlctl.storage import local

_JSON_COLUMNS = b"rlctl.json_columns"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One problem.

    `prompt` is a chat (a list of {role, content}), `ground_truth` an argument of the reward.
    `style` is verl's kind of reward, `extra_info` any further fields. `agent_name` is verl's kind
    of agent, empty for the configured one.
    """

    data_source: str
    prompt: list[dict[str, str]]
    ground_truth: Any
    ability: str = ""
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str = ""


def read_rows(
    path: str | Path, *, prompt_key: str = "prompt", reward_fn_key: str = "data_source"
) -> list[PromptRow]:
    """Return all rows of a parquet, `.jsonl` or `.json` file, local or at a URL.

    `prompt_key` and `reward_fn_key` name the columns to use. `prompt_key` may be a dotted path such
    as `extra_info.question`; a text is the message of one user. Raises one ConfigError with all
    problems of the file: missing, unreadable, wrong columns or malformed rows. Parquet rows are
    numbered from 0, JSONL lines from 1.
    """
    path = Path(local(str(path))).expanduser()
    if not path.is_file():
        near = (
            sorted(
                each.name
                for each in path.parent.glob("*")
                if each.suffix in (".parquet", ".jsonl", ".json")
            )
            if path.parent.is_dir()
            else []
        )
        hint = (
            f"data files in {path.parent}: {', '.join(near)}"
            if near
            else "create one with `rlctl prep gsm8k` or `rlctl prep arithmetic`"
        )
        raise ConfigError(
            "the data file is a folder" if path.is_dir() else "the data file does not exist",
            where=str(path),
            hint=hint,
        )
    records = (
        read_records(path)
        if path.suffix in (".jsonl", ".json")
        else _read_parquet(path, prompt_key, reward_fn_key)
    )
    if not records:
        raise ConfigError("the data file has no rows", where=str(path))
    rows: list[PromptRow] = []
    problems = column_problems(records)
    for where, record in records:
        faults = row_faults(record, prompt_key, reward_fn_key)
        problems += [Problem(fault, where) for fault in faults]
        if not faults:
            rows.append(_row(record, prompt_key, reward_fn_key))
    raise_capped(problems, path)
    return rows


def write_rows(path: str | Path, rows: Sequence[PromptRow]) -> None:
    """Write a parquet file atomically, replacing an existing one.

    Raises ResourceError if it cannot be written; then an existing file stays unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    extra_info, extra_is_json = _column([row.extra_info for row in rows])
    ground_truth, truth_is_json = _column([row.ground_truth for row in rows])
    agents = [row.agent_name for row in rows]
    table = pa.table(
        {
            "data_source": pa.array([row.data_source for row in rows], pa.string()),
            "prompt": pa.array([row.prompt for row in rows], pa.list_(message)),
            "ability": pa.array([row.ability for row in rows], pa.string()),
            "reward_model": pa.StructArray.from_arrays(
                [pa.array([row.style for row in rows], pa.string()), ground_truth],
                ["style", "ground_truth"],
            ),
            "extra_info": extra_info,
            **({"agent_name": pa.array(agents, pa.string())} if any(agents) else {}),
        }
    )
    as_json = [
        name
        for name, is_json in (("extra_info", extra_is_json), ("ground_truth", truth_is_json))
        if is_json
    ]
    table = table.replace_schema_metadata(
        {_JSON_COLUMNS: ",".join(as_json).encode()} if as_json else None
    )
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            pq.write_table(table, aside)
    except OSError as error:
        raise ResourceError(
            f"cannot write the data file: {error.strerror or error}", where=str(path)
        ) from error


def _column(values: list[Any]) -> tuple[Any, bool]:
    """Return an Arrow array of `values`, and True if they had to be encoded as JSON text.

    That is the case if Arrow would not return equal values.
    """
    import pyarrow as pa

    try:
        array = pa.array(values)
        if _storable(array.type) and array.to_pylist() == values:
            return array, False
    except pa.ArrowException:
        pass
    return pa.array([json.dumps(value, ensure_ascii=False) for value in values], pa.string()), True


def _storable(kind: Any) -> bool:
    """Return True if parquet can store the Arrow type: it has no structs without fields."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return kind.num_fields > 0 and all(
            _storable(kind.field(i).type) for i in range(kind.num_fields)
        )
    return _storable(kind.value_type) if types.is_list(kind) else True


def _read_parquet(path: Path, prompt_key: str, reward_fn_key: str) -> list[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = [
            name
            for name in dict.fromkeys(
                (
                    prompt_key.partition(".")[0],
                    reward_fn_key,
                    "reward_model",
                    "ability",
                    "extra_info",
                    *CHECKED,
                    *AGENT_COLUMNS,
                )
            )
            if name in file.schema_arrow.names
        ]
        raise_capped(schema_problems(file.schema_arrow, path, prompt_key, reward_fn_key), path)
        table = file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"not a readable parquet file: {str(error).splitlines()[0]}",
            where=str(path),
            hint=CONTRACT_HINT,
        ) from error
    as_json = (table.schema.metadata or {}).get(_JSON_COLUMNS, b"").decode().split(",")
    records = table.to_pylist()
    for record in records:
        if isinstance(record.get("extra_info"), str):
            record["extra_info"] = json.loads(record["extra_info"])
        if "ground_truth" in as_json:
            record["reward_model"]["ground_truth"] = json.loads(
                record["reward_model"]["ground_truth"]
            )
    return [(f"{path}, row {index}", record) for index, record in enumerate(records)]


def _row(record: dict[str, Any], prompt_key: str, reward_fn_key: str) -> PromptRow:
    reward = record["reward_model"]
    prompt = prompt_of(record, prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return PromptRow(
        data_source=record[reward_fn_key],
        prompt=[{"role": message["role"], "content": message["content"]} for message in prompt],
        ground_truth=reward["ground_truth"],
        ability=record.get("ability") or "",
        style=reward.get("style") or "rule",
        extra_info=with_agent_columns(record),
        agent_name=agent_name(record),
    )

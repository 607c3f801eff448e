"""The data contract: what one row of prompts holds, and its parquet and JSONL forms.

    data_source   string
    prompt        list<struct<role: string, content: string>>
    ability       string                                          (may be missing)
    reward_model  struct<style: string, ground_truth: anything>
    extra_info    struct of anything                              (may be missing)

The columns are verl's, so its files are read as they are. Arrow knows one type a column: where rows differ in the keys or the types of
`extra_info` or `ground_truth`, the column is written as JSON text and the file's metadata says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.data_prep.records import raise_capped, read_records
from rlctl.errors import ConfigError, Problem, ResourceError
from rlctl.files import replacing
from rlctl.storage import local

_JSON_COLUMNS = b"rlctl.json_columns"
_CONTRACT_HINT = (
    "`rlctl prep jsonl` makes such a file from your own; `rlctl data show FILE` looks into one"
)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One problem. `prompt` is a chat (a list of {role, content}); `ground_truth` is what the reward function compares with."""

    data_source: str
    prompt: list[dict[str, str]]
    ground_truth: Any
    ability: str = ""
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)


def read_rows(
    path: str | Path, *, prompt_key: str = "prompt", reward_fn_key: str = "data_source"
) -> list[PromptRow]:
    """All rows of a parquet file, or of a `.jsonl` file of the same shape, here or at an address;
    `prompt_key` and `reward_fn_key` name the columns to use.

    Raises one ConfigError with every problem of the file (the first ten in full): it is missing or unreadable, a column is missing or
    of another type, a row is malformed. Parquet rows count from 0, JSONL lines from 1.
    """
    path = Path(local(str(path))).expanduser()
    if not path.is_file():
        near = (
            sorted(
                each.name for each in path.parent.glob("*") if each.suffix in (".parquet", ".jsonl")
            )
            if path.parent.is_dir()
            else []
        )
        hint = (
            f"data files in {path.parent}: {', '.join(near)}"
            if near
            else "`rlctl prep gsm8k` or `rlctl prep arithmetic` makes one"
        )
        raise ConfigError(
            "the data file is a folder" if path.is_dir() else "the data file does not exist",
            where=str(path),
            hint=hint,
        )
    records = (
        read_records(path)
        if path.suffix == ".jsonl"
        else _read_parquet(path, prompt_key, reward_fn_key)
    )
    if not records:
        raise ConfigError("the data file has no rows", where=str(path))
    rows: list[PromptRow] = []
    problems: list[Problem] = []
    for where, record in records:
        faults = _faults(record, prompt_key, reward_fn_key)
        problems += [Problem(fault, where) for fault in faults]
        if not faults:
            rows.append(_row(record, prompt_key, reward_fn_key))
    raise_capped(problems, path)
    return rows


def write_rows(path: str | Path, rows: Sequence[PromptRow]) -> None:
    """Write a parquet file: aside first, then renamed, so that a file of this name is always a whole one. Replaces what was there.

    Raises ResourceError when the disk is full or the place is not writable; nothing is left behind then.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    extra_info, extra_is_json = _column([row.extra_info for row in rows])
    ground_truth, truth_is_json = _column([row.ground_truth for row in rows])
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
    """An arrow array of `values`, and whether it holds them as JSON text because arrow could not give them back as they are."""
    import pyarrow as pa

    try:
        array = pa.array(values)
        if _storable(array.type) and array.to_pylist() == values:
            return array, False
    except pa.ArrowException:
        pass
    return pa.array([json.dumps(value, ensure_ascii=False) for value in values], pa.string()), True


def _storable(kind: Any) -> bool:
    """Parquet cannot hold a struct without fields."""
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
            for name in (prompt_key, reward_fn_key, "reward_model", "ability", "extra_info")
            if name in file.schema_arrow.names
        ]
        raise_capped(_schema_problems(file.schema_arrow, path, prompt_key, reward_fn_key), path)
        table = file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"not a readable parquet file: {str(error).splitlines()[0]}",
            where=str(path),
            hint=_CONTRACT_HINT,
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


def _schema_problems(schema: Any, path: Path, prompt_key: str, reward_fn_key: str) -> list[Problem]:
    import pyarrow.types as types

    def is_text(kind: Any) -> bool:
        return (
            types.is_string(kind)
            or types.is_large_string(kind)
            or (types.is_dictionary(kind) and is_text(kind.value_type))
        )

    def has_fields(kind: Any, names: tuple[str, ...]) -> bool:
        return types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)

    def is_chat(kind: Any) -> bool:
        return (types.is_list(kind) or types.is_large_list(kind)) and has_fields(
            kind.value_type, ("role", "content")
        )

    wanted = {
        prompt_key: (is_chat, "list<struct<role: string, content: string>>"),
        reward_fn_key: (is_text, "string"),
        "reward_model": (
            lambda kind: has_fields(kind, ("ground_truth",)),
            "struct<style: string, ground_truth: ...>",
        ),
        "extra_info": (
            lambda kind: types.is_struct(kind) or types.is_null(kind) or is_text(kind),
            "struct<...>",
        ),
    }
    problems = []
    for name, (fits, description) in wanted.items():
        where = f"{path}, column {name}"
        if name in schema.names:
            if not fits(schema.field(name).type):
                problems.append(
                    Problem(
                        f"column {name!r} is {schema.field(name).type}, wanted {description}",
                        where,
                        _CONTRACT_HINT,
                    )
                )
        elif name != "extra_info":
            problems.append(
                Problem(
                    f"there is no column {name!r} ({description}); columns: {', '.join(schema.names)}",
                    where,
                    _CONTRACT_HINT,
                )
            )
    return problems


def _faults(record: Any, prompt_key: str, reward_fn_key: str) -> list[str]:
    """What is wrong with one row, in words; empty when it is a good one."""
    if not isinstance(record, dict):
        return [
            f"the row is {type(record).__name__}, wanted an object with the columns {prompt_key}, {reward_fn_key}, reward_model"
        ]
    faults = []
    source = record.get(reward_fn_key)
    if not isinstance(source, str) or not source:
        faults.append(f"column {reward_fn_key!r} is {source!r}, wanted a text that is not empty")
    chat = record.get(prompt_key)
    if not isinstance(chat, list) or not chat:
        faults.append(
            f"column {prompt_key!r} is {_short(chat)}, wanted a list of {{role, content}} that is not empty"
        )
    else:
        for position, message in enumerate(chat):
            texts = (
                (message.get("role"), message.get("content"))
                if isinstance(message, dict)
                else (None,)
            )
            if not all(isinstance(text, str) for text in texts) or not texts[0]:
                faults.append(
                    f"column {prompt_key!r}, message {position} is {_short(message)}, wanted {{role, content}}, both text"
                )
    reward = record.get("reward_model")
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        faults.append(
            f"column 'reward_model' is {_short(reward)}, wanted {{style, ground_truth}} with a ground_truth that is not null"
        )
    if not isinstance(record.get("extra_info"), dict | None):
        faults.append(f"column 'extra_info' is {_short(record['extra_info'])}, wanted an object")
    return faults


def _row(record: dict[str, Any], prompt_key: str, reward_fn_key: str) -> PromptRow:
    reward = record["reward_model"]
    return PromptRow(
        data_source=record[reward_fn_key],
        prompt=[
            {"role": message["role"], "content": message["content"]}
            for message in record[prompt_key]
        ],
        ground_truth=reward["ground_truth"],
        ability=record.get("ability") or "",
        style=reward.get("style") or "rule",
        extra_info=record.get("extra_info") or {},
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

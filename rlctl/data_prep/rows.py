"""Data contract: fields of a prompt row, and its parquet and JSONL files.

    data_source   string
    prompt        list<struct<role: string, content: string>>
    ability       string                                          (may be missing)
    reward_model  struct<style: string, ground_truth: anything>
    extra_info    struct of anything                              (may be missing)
    images        list<struct<bytes: binary, path: string>>       (may be missing)

The columns are verl's, so its files can be read unchanged. An Arrow column has one type: if rows
differ in the keys or types of `extra_info` or `ground_truth`, the column is written as JSON text
and named in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.data_prep import agent_columns
from rlctl.data_prep.agent_columns import AGENT_COLUMNS, ENV_CLASS, with_agent_columns
from rlctl.data_prep.arrow_types import records_of
from rlctl.data_prep.contract import (
    CONTRACT_HINT,
    REWARD_SPEC,
    Fault,
    contract_hint,
    is_blank,
    missing_columns,
    prompt_of,
    raise_capped,
    row_faults,
)
from rlctl.data_prep.message_parts import IMAGE_KEY, text_of
from rlctl.data_prep.parquet_files import BATCH_ROWS, readable_parquet, stream_parquet
from rlctl.data_prep.row_columns import (
    CHECKED,
    JSON_COLUMNS,
    arrow_tables,
    column_problems,
    unsupported_fields,
)
from rlctl.errors import ConfigError, Problem
from rlctl.files import replacing
from rlctl.storage import local

if TYPE_CHECKING:
    from rlctl.data_prep.images import Image

_COLUMNS = ("reward_model", REWARD_SPEC, "ability", "extra_info")
_RECORD = "rlctl.record"  # column of the records of a JSON file


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PromptRow:
    """One problem.

    `prompt` is a chat (a list of {role, content}); a text becomes the message of one user.
    `ground_truth` is an argument of the reward.
    `style` is verl's kind of reward, `extra_info` any further fields. `agent_name` is verl's kind
    of agent, empty for the configured one. The text of `prompt` refers to `images` by `<image>`.
    """

    data_source: str
    prompt: list[dict[str, str]]
    ground_truth: Any
    ability: str = ""
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str = ""
    images: tuple[Image, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.images:
            from rlctl.data_prep.images import images_of

            object.__setattr__(self, "images", images_of(self.images))
        if isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", [{"role": "user", "content": self.prompt}])


class RowSource(Protocol):
    """Rows that can be read several times."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __iter__(self) -> Iterator[PromptRow]:
        """Yield the rows."""
        ...


def read_rows(path: str | Path, **keys: str) -> list[PromptRow]:
    """Return what `stream_rows` yields."""
    return list(stream_rows(path, **keys))


def stream_rows(
    path: str | Path,
    *,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    image_key: str = IMAGE_KEY,
) -> Iterator[PromptRow]:
    """Yield all rows of a parquet, `.jsonl` or `.json` file, local or at a URL.

    `prompt_key`, `reward_fn_key` and `image_key` name the columns to use. `prompt_key` may be a
    dotted path such as `extra_info.question`; a text is the message of one user. Raises one
    ConfigError with all problems of the file: missing, unreadable, wrong columns or malformed rows,
    these after the last row. Parquet rows are numbered from 0, JSONL lines from 1.
    """
    for _, rows in read_batches(existing_file(path), prompt_key, reward_fn_key, image_key):
        yield from rows


def existing_file(path: str | Path) -> Path:
    """Return the local path of a data file, downloaded if necessary. Raises ConfigError."""
    given = str(path)
    path = Path(local(given)).expanduser()
    if path.is_file():
        return path
    from rlctl.data_prep.missing_data import missing_file

    raise missing_file(given, path)


def read_batches(
    path: Path, prompt_key: str, reward_fn_key: str, image_key: str, skip: bool = False
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the rows of a file in parts, each after the Arrow batch that `decode` makes it from.

    Problems are raised after the last row. With `skip`, a row's first `Fault` takes its place.
    """
    batches = _parquet_batches(path, prompt_key, reward_fn_key, image_key)
    if path.suffix.lower() in (".jsonl", ".json"):
        batches = _json_batches(path, skip)
    number = 0
    problems: list[Problem] = []
    unsupported: dict[str, list[str]] = {}
    for batch, places in batches:
        rows: list[PromptRow | Fault] = []
        for where, record in zip(places, _records(batch), strict=True):
            faults = row_faults(record, prompt_key, reward_fn_key, image_key)
            for name in unsupported_fields(record, image_key):
                unsupported.setdefault(name, []).append(where)
            if not faults and is_blank(record, prompt_key):
                faults = [Fault(f"{prompt_key} is empty", f"column {prompt_key!r} has no text")]
            if not faults:
                rows.append(_row(record, prompt_key, reward_fn_key, image_key))
            elif skip:
                rows.append(faults[0])
            else:
                hint = contract_hint(path, record) if isinstance(record, dict) else None
                problems += [Problem(fault.message, where, hint) for fault in faults]
        number += batch.num_rows
        yield batch, rows
    if not number:
        raise ConfigError("the data file has no rows", where=str(path))
    raise_capped([*column_problems(unsupported, number), *problems], path)


def decode(batch: Any, numbers: Iterable[int], *keys: str) -> list[PromptRow]:
    """Return the rows `numbers`, which have no faults, of an Arrow batch of `read_batches`."""
    records = _records(batch)
    return [_row(records[number], *keys) for number in numbers]


def decode_prompts(
    batch: Any, numbers: Iterable[int], prompt_key: str
) -> list[list[dict[str, str]]]:
    """Return the prompts of the rows `numbers` of an Arrow batch; decode nothing else."""
    if batch.schema.names != [_RECORD]:
        batch = batch.select([prompt_key.partition(".")[0]])
    records = _records(batch)
    return [_prompt(records[number], prompt_key) for number in numbers]


def write_rows(path: str | Path, rows: RowSource) -> None:
    """Write a parquet file atomically, replacing an existing one.

    Raises ResourceError if it cannot be written, ConfigError for rows of wrong types; then an
    existing file stays unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path).expanduser()
    tables = arrow_tables(rows)
    try:
        first = next(tables)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside, pq.ParquetWriter(aside, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
    except OSError as error:
        from rlctl.write_errors import cannot_write

        raise cannot_write("the data file", path, error) from error
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise ConfigError(
            f"a row cannot be stored: {str(error).splitlines()[0]}",
            where=str(path),
            hint="a prompt is a text or a list of {role, content}; all of it is Unicode text",
        ) from error


def _json_batches(path: Path, skip: bool) -> Iterator[tuple[Any, list[str]]]:
    """Yield the records as JSON text, with their positions; with `skip` null for a broken line."""
    import pyarrow as pa

    from rlctl.data_prep.records import raw_records, read_records

    records = read_records(path)
    if skip:
        raw = raw_records(path)
        records = ((where, None if isinstance(item, ValueError) else item) for where, item in raw)
    while part := list(islice(records, BATCH_ROWS)):
        texts = pa.array([json.dumps(record) for _, record in part], pa.string())
        yield pa.record_batch({_RECORD: texts}), [where for where, _ in part]


def _parquet_batches(
    path: Path, prompt_key: str, reward_fn_key: str, image_key: str
) -> Iterator[tuple[Any, list[str]]]:
    """Yield the columns that rows need, with the positions of the rows."""
    if path.suffix.lower() in (".csv", ".tsv"):
        from rlctl.data_prep.records import read_records

        columns = next(iter(read_records(path)), ("", {}))[1]
        hint = contract_hint(path, columns)
        raise ConfigError("a CSV file must be converted first", where=str(path), hint=hint)
    with readable_parquet(path, CONTRACT_HINT) as file:
        keys = (prompt_key.partition(".")[0], reward_fn_key, image_key)
        known = (*keys, *_COLUMNS, *CHECKED, *AGENT_COLUMNS)
        names = file.schema_arrow.names
        columns = [name for name in names if ENV_CLASS in names or name in known]
        raise_capped(missing_columns(names, path, prompt_key, reward_fn_key), path)
        start = 0
        for batch in stream_parquet(file, columns):
            yield batch, [f"{path}, row {start + number}" for number in range(batch.num_rows)]
            start += batch.num_rows


def _records(batch: Any) -> list[Any]:
    """Return the records of an Arrow batch of `read_batches`."""
    if batch.schema.names == [_RECORD]:
        return [_unpacked(json.loads(text)) for text in batch.column(0).to_pylist()]
    as_json = (batch.schema.metadata or {}).get(JSON_COLUMNS, b"").decode().split(",")
    records = [_unpacked(record) for record in records_of(batch)]
    for record in records:
        if "ground_truth" in as_json and "reward_model" in record:
            record["reward_model"]["ground_truth"] = json.loads(
                record["reward_model"]["ground_truth"]
            )
    return records


def _unpacked(record: Any) -> Any:
    """Return a record with `extra_info` that was JSON text, and SkyRL's name of `reward_model`."""
    if not isinstance(record, dict):
        return record
    if isinstance(extra_info := record.get("extra_info"), str):
        from rlctl.data_prep.records import parse_json

        # Text that is no JSON stays one, which is a fault of the row.
        with suppress(ValueError):
            record["extra_info"] = parse_json(extra_info) if extra_info else None
    spec = record.get(REWARD_SPEC)
    if isinstance(spec, dict) and "reward_model" not in record:
        record["reward_model"] = {**spec, "style": spec.get("method")}
    return record


def _row(record: dict[str, Any], prompt_key: str, reward_fn_key: str, image_key: str) -> PromptRow:
    reward = record["reward_model"]
    return PromptRow(
        data_source=record[reward_fn_key],
        prompt=_prompt(record, prompt_key),
        ground_truth=reward["ground_truth"],
        ability=record.get("ability") or "",
        style=reward.get("style") or "rule",
        extra_info=with_agent_columns(record),
        agent_name=agent_columns.agent_name(record),
        images=_images(record.get(image_key)),
    )


def _images(value: Any) -> tuple[Image, ...]:
    if value is None:
        return ()
    from rlctl.data_prep.images import images_of

    return images_of(value)


def _prompt(record: dict[str, Any], prompt_key: str) -> list[dict[str, str]]:
    prompt = prompt_of(record, prompt_key)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": item["role"], "content": text_of(item["content"])} for item in prompt]

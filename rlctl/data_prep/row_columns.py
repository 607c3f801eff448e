"""Arrow tables of prompt rows, with the types that all rows share.

Columns of verl's data files for videos and audio are refused, unless they have no content, and
those for images under another name than the configured one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.data_prep.images import Image
    from rlctl.data_prep.rows import PromptRow, RowSource

JSON_COLUMNS = b"rlctl.json_columns"  # metadata of a file: names of columns that are JSON text
_TABLE_ROWS = 16_384  # of a row group, which is in memory
_TABLE_BYTES = 2**26  # of the images in it
_FREE: dict[str, Callable[[PromptRow], Any]] = {
    "extra_info": lambda row: row.extra_info,
    "ground_truth": lambda row: row.ground_truth,
}
_OPTIONAL = ("agent_name", "images")  # columns that a file has if a row has content for them


def arrow_tables(rows: RowSource) -> Iterator[Any]:
    """Yield all rows as tables of one schema; one table without rows if there are none."""
    types, others = _types(rows)
    as_json = [name for name, kind in types.items() if kind is None]
    metadata = None
    if as_json:
        metadata = {JSON_COLUMNS: ",".join(as_json).encode()}
    for part in _parts(rows) if len(rows) else [[]]:
        yield _table(part, types, others).replace_schema_metadata(metadata)


def _types(rows: RowSource) -> tuple[dict[str, Any], set[str]]:
    """Return the Arrow types of values that may have any, and the other columns with content.

    A type is None if Arrow would not return equal values.
    """
    import pyarrow as pa

    found: dict[str, dict[Any, None]] = {name: {} for name in _FREE}
    others = set[str]()
    for part in _parts(rows):
        for name, kinds in found.items():
            kinds[_type_of(part, name)] = None
        others |= {name for name in _OPTIONAL if any(getattr(row, name) for row in part)}
    types = {name: _unified(list(kinds) or [pa.null()]) for name, kinds in found.items()}
    several = [name for name, kinds in found.items() if len(kinds) > 1]
    for part in _parts(rows) if several else ():
        for name in several:
            types[name] = types[name] and _type_of(part, name, types[name])
    return types, others


def _type_of(part: Sequence[PromptRow], name: str, kind: Any = None) -> Any:
    """Return `kind`, or the type that Arrow infers, if an array of it has equal values."""
    import pyarrow as pa

    values = [_FREE[name](row) for row in part]
    try:
        array = pa.array(values, kind)
        return array.type if _storable(array.type) and array.to_pylist() == values else None
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None


def _unified(kinds: Sequence[Any]) -> Any:
    """Return a type for values of all `kinds`; None if there is none."""
    import pyarrow as pa

    if None in kinds:
        return None
    try:
        fields = [pa.schema([("value", kind)]) for kind in kinds]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _parts(rows: RowSource) -> Iterator[list[PromptRow]]:
    from rlctl.data_prep.rows import PromptRow

    part: list[PromptRow] = []
    size = 0
    for row in rows:
        if not isinstance(row, PromptRow):
            raise ConfigError(f"a row of the data set is {row!r:.60}, not a PromptRow")
        part.append(row)
        size += sum(map(len, row.images))
        if len(part) == _TABLE_ROWS or size >= _TABLE_BYTES:
            yield part
            part = []
            size = 0
    if part:
        yield part


def _table(rows: list[PromptRow], types: dict[str, Any], others: set[str]) -> Any:
    """Return an Arrow table of rows; a type that is None makes a column of JSON text.

    `others` are the optional columns that it has.
    """
    import pyarrow as pa

    def free(name: str) -> Any:
        values = [_FREE[name](row) for row in rows]
        if types[name] is None:
            return pa.array([json.dumps(item, ensure_ascii=False) for item in values], pa.string())
        return pa.array(values, types[name])

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    optional = {
        "agent_name": lambda: pa.array([row.agent_name for row in rows], pa.string()),
        "images": lambda: pa.array([[*map(_struct, row.images)] for row in rows], images),
    }
    return pa.table(
        {
            "data_source": pa.array([row.data_source for row in rows], pa.string()),
            "prompt": pa.array([row.prompt for row in rows], pa.list_(message)),
            "ability": pa.array([row.ability for row in rows], pa.string()),
            "reward_model": pa.StructArray.from_arrays(
                [pa.array([row.style for row in rows], pa.string()), free("ground_truth")],
                ["style", "ground_truth"],
            ),
            "extra_info": free("extra_info"),
            **{name: column() for name, column in optional.items() if name in others},
        }
    )


def _struct(image: Image) -> dict[str, Image | None]:
    if isinstance(image, str):
        return {"bytes": None, "path": image}
    return {"bytes": image, "path": None}


def _storable(kind: Any) -> bool:
    """Return True if parquet can store the Arrow type: it has no structs without fields."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return kind.num_fields > 0 and all(
            _storable(kind.field(i).type) for i in range(kind.num_fields)
        )
    return not types.is_list(kind) or _storable(kind.value_type)


# Columns that are read if a file has them, to check that they are empty.
CHECKED = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")

_NAMES = frozenset(CHECKED)
_IMAGES = ("images", "image")
_OTHER_IMAGES = "images are read from the column data.image_key only"


def unsupported_fields(record: Any, image_key: str) -> list[str]:
    """Return the names of unsupported fields with content, in a column or in `extra_info`."""
    if not isinstance(record, dict):
        return []
    extra_info = record.get("extra_info")
    nested = extra_info if isinstance(extra_info, dict) else {}
    if _NAMES.isdisjoint(record) and _NAMES.isdisjoint(nested):
        return []
    # The values of a column of images may be long; that column is supported.
    others = {name: value for name, value in record.items() if name != image_key}
    return [name for name in CHECKED if has_content(others.get(name) or nested.get(name))]


def column_problems(places: Mapping[str, Sequence[str]], num_rows: int) -> list[Problem]:
    """Return one problem for each unsupported field; `places` are its rows with content."""
    problems: list[Problem] = []
    for name in CHECKED:
        if found := places.get(name):
            reason = "videos and audio are not supported"
            hint = f"remove {name!r}, or train on rows without it"
            if name in _IMAGES:
                reason = _OTHER_IMAGES
                hint = f"data.image_key={name}"
            message = f"{len(found)} of {num_rows} rows have {name!r}: {reason}"
            problems.append(Problem(message, found[0], hint))
    return problems


def has_content(value: Any) -> bool:
    """Return False for null, empty text or lists, and mappings without content."""
    if isinstance(value, dict):
        return any(has_content(item) for item in value.values())
    return value is not None and value != "" and value != []

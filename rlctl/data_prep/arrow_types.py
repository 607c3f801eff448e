"""Arrow types that Python records cannot have as they are: maps, and names that occur twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError


def records_of(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch as records; a map becomes an object, as a struct does."""
    records = batch.to_pylist()
    if "map<" not in str(batch.schema):  # `maps_as_pydicts` needs pyarrow 19
        return records
    for column in batch.schema:
        for record in records:
            record[column.name] = _plain(record[column.name], column.type)
    return records


def _plain(value: Any, kind: Any) -> Any:
    from pyarrow import types

    if value is None:
        return None
    if types.is_map(kind):
        return {str(key): _plain(item, kind.item_type) for key, item in value}
    if types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return {field.name: _plain(value[field.name], field.type) for field in fields}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def check_names(schema: Any, path: Path) -> None:
    """Raise ConfigError if two columns of a file, or two fields of a struct, have one name."""
    if (twice := _repeated(schema.names)) is not None:
        raise ConfigError(
            f"two columns are named {twice!r}",
            where=str(path),
            hint="drop or rename one of them, and write the file again",
        )
    for column in schema:
        _check_fields(column.type, f"{path}, column {column.name}")


def _check_fields(kind: Any, where: str) -> None:
    children = [kind.field(number) for number in range(kind.num_fields)]
    if (twice := _repeated([child.name for child in children])) is not None:
        raise ConfigError(
            f"two fields are named {twice!r}",
            where=where,
            hint="drop or rename one of them, and write the file again",
        )
    for child in children:
        _check_fields(child.type, where)


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)

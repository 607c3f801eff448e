"""Readers of raw records in JSONL, JSON, CSV, parquet or Arrow, with positions for errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from rlctl.data_prep.arrow_types import check_names, records_of
from rlctl.data_prep.contract import raise_capped
from rlctl.data_prep.message_parts import shortened
from rlctl.data_prep.parquet_files import BATCH_ROWS, readable_parquet, stream_parquet
from rlctl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.data_prep.text_files import TextForm

MAX_DEPTH = 100  # of lists and objects in a record: Arrow and Python have limits, too
_TOO_DEEP = f"lists or objects are nested more than {MAX_DEPTH} deep"

T = TypeVar("T")


def convert(
    files: Iterable[Path],
    make: Callable[[Any, int, Path], T],
    hint: str | None = None,
    skipped: list[Problem] | None = None,
    form: TextForm | None = None,
) -> Iterator[T]:
    """Yield `make(record, index, path)` of each record of files; `index` counts all records.

    A ValueError of `make` is a problem of the record. Those of a file are raised as one ConfigError
    after its last record, with `hint`, or appended to `skipped`. `form` is that of text files.
    Raises ConfigError for a file without records, unless problems are skipped.
    """
    index = 0
    for path in files:
        first = index
        problems = skipped
        if problems is None:
            problems = []
        for index, (where, record) in enumerate(read_records(path, form, problems), first + 1):
            try:
                made = make(record, index - 1, path)
            except ValueError as error:
                problems.append(Problem(str(error), where, hint))
                continue
            yield made
        if skipped is None:
            raise_capped(problems, path)
        if index == first and skipped is None:
            raise ConfigError("the file contains no records", where=str(path))


def read_records(
    path: Path, form: TextForm | None = None, wrong: list[Problem] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (position, record) of every record in a file, a text file of this form.

    Positions are `file:line` in JSONL and CSV, `file, record N` in a JSON list and `file, row N` in
    parquet and Arrow; N starts at 0. A field of CSV or TSV is a text, an empty one None. Without a
    form JSON is UTF-8. Raises one ConfigError for a file that cannot be parsed, for lines that
    cannot after the last one, unless their problems are appended to `wrong`.
    """
    problems = wrong
    if problems is None:
        problems = []
    for where, record in raw_records(path, form):
        if isinstance(record, ValueError):
            problems.append(Problem(_reason(record), where))
        else:
            yield where, record
    if wrong is None:
        raise_capped(problems, path)


def raw_records(path: Path, form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what `read_records` yields, and the ValueError of a record that cannot be parsed."""
    return _READERS.get(path.suffix.lower(), _jsonl)(path, form)


def place_in(path: Path, number: int) -> str:
    """Return the position of a record, counted from 0, as `read_records` does."""
    if path.suffix.lower() not in _READERS or path.suffix.lower() == ".json":
        return next(islice((where for where, _ in raw_records(path)), number, None))
    return f"{path}, row {number}"


def value_at(record: Any, dotted: str) -> Any:
    """Return the value at a key, or at a dotted path of keys. Raises ValueError without it."""
    value = record
    if not isinstance(record, dict):
        raise ValueError(f"the record is {type(record).__name__}, expected an object")
    parts = dotted.split(".")
    if dotted in record:
        parts = [dotted]
    for part in parts:
        if not isinstance(value, dict):
            raise ValueError(f"cannot resolve {dotted!r}: {shortened(value)} is not an object")
        if part not in value:
            raise ValueError(f"no key {dotted!r}; keys: {', '.join(map(str, value))}")
        value = value[part]
    return value


@contextmanager
def _opened(path: Path, form: TextForm | None = None) -> Iterator[TextIO]:
    """Open a text file to read, UTF-8 without `form`. Raises ConfigError if it cannot be read."""
    if form is not None:
        from rlctl.data_prep.text_files import opened

        with opened(path, form) as file:
            yield file
        return
    try:
        # "-sig": Windows and Excel write a mark first.
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        hint = "`rlctl prep jsonl FILE` reads other encodings than UTF-8"
        raise ConfigError(
            f"not a readable text file: {error}", where=str(path), hint=hint
        ) from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for text that is no JSON, is nested deeper than `MAX_DEPTH`, or has half of a
    surrogate pair (`"\\ud83d"`), which no tokenizer and no file can take.
    """
    may_be_deep = text.count("[") + text.count("{") > MAX_DEPTH
    return _checked(_loads(text), may_be_deep, "\\ud" in text.lower())


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _checked(value: Any, may_be_deep: bool, has_surrogates: bool) -> Any:
    """Return the value. Raises ValueError as `parse_json` does."""
    if may_be_deep and _depth(value) > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if has_surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):x}"
            raise ValueError(f"a text has half of a surrogate pair, {code}") from None
    return value


def _depth(value: Any) -> int:
    """Return how many lists and objects contain each other."""
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            else:
                inner += item
        level = inner
        depth += 1
    return depth


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    return str(error)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or its ValueError."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error


def _jsonl(path: Path, form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    with _opened(path, form) as file:
        # Unlike `str.splitlines`, a file does not split at U+2028, which JSON text may contain.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _attempt(parse_json, line.removesuffix("\n"))


def _json(path: Path, form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    try:
        with _opened(path, form) as file:
            text = file.read()
        records = _loads(text)
        has_surrogates = "\\ud" in text.lower()
    except ValueError as error:
        where = str(path)
        if isinstance(error, json.JSONDecodeError):
            where += f":{error.lineno}"
        raise ConfigError(_reason(error), where=where) from error
    if not isinstance(records, list):
        raise ConfigError(
            f"the file contains {type(records).__name__}, expected a list of records",
            where=str(path),
        )
    del text
    for index, record in enumerate(records):
        yield f"{path}, record {index}", _attempt(_checked, record, True, has_surrogates)


def _csv(path: Path, form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    from rlctl.data_prep.text_files import TextForm, csv_records

    return csv_records(path, form or TextForm())


def _arrow(path: Path, _form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file of `datasets.Dataset.save_to_disk`, an Arrow stream."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
            check_names(batches.schema, path)
            parts = (
                batch.slice(start, BATCH_ROWS)
                for batch in batches
                for start in range(0, batch.num_rows, BATCH_ROWS)
            )
            yield from numbered(path, parts)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"not a readable Arrow stream: {str(error).splitlines()[0]}", where=str(path)
        ) from error


def _parquet(path: Path, _form: TextForm | None = None) -> Iterator[tuple[str, Any]]:
    with readable_parquet(path) as file:
        yield from numbered(path, stream_parquet(file))


_READERS = {".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".tsv": _csv, ".json": _json}


def numbered(path: Path, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the records of Arrow batches with their positions."""
    records = chain.from_iterable(map(records_of, batches))
    for index, record in enumerate(records):
        yield f"{path}, row {index}", record

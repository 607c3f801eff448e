"""Checks of all rows of data files: fields that an algorithm reads, and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.data_prep.agent_columns import ENV_CLASS
from rlctl.data_prep.contract import TRUTH_PATH, Fault
from rlctl.errors import ConfigError, Problem
from rlctl.runtime.data.row_table import Rows

if TYPE_CHECKING:
    from rlctl.data_prep.row_fields import RowField

SKIP_HINT = "data.skip_invalid=true leaves such rows out of training, and counts them"

_MAX_PLACES = 3  # rows with one fault that an error lists
_MAX_DECODED = 20_000  # rows that are decoded to look for empty truths
_TRUTH = "ground_truth"
# Of a value in a column.
_NULL = 1
_EMPTY = 2
_DECODE = 3  # its decoded row decides


@dataclass
class RowFaults:
    """Faults of N rows: `numbers` (N,) are 0 without a fault, else 1 + its index in `faults`."""

    numbers: np.ndarray
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def find(cls, rows: Rows, fields: Sequence[RowField]) -> RowFaults:
        """Return the first fault of each row in the `fields` that an algorithm reads."""
        found = cls(np.zeros(len(rows), np.int32))
        if not fields:
            return found
        from rlctl.data_prep.row_fields import read_field

        for each in fields:
            codes = _codes(rows, each.path, each.is_number)
            if codes is None:
                for position, row in enumerate(rows):
                    found._add(read_field(row, each), np.array([position]))
                continue
            for code in (_NULL, _EMPTY):
                positions = np.flatnonzero(codes == code)
                if len(positions):
                    found._add(read_field(rows[int(positions[0])], each), positions)
            for position in np.flatnonzero(codes == _DECODE).tolist():
                found._add(read_field(rows[position], each), np.array([position]))
        return found

    def _add(self, value: object, positions: np.ndarray) -> None:
        """Record a fault of the rows at `positions` that have none; other values are valid."""
        if isinstance(value, Fault):
            known = [fault.reason for fault in self.faults]
            if value.reason not in known:
                self.faults.append(value)
                known.append(value.reason)
            free = positions[self.numbers[positions] == 0]
            self.numbers[free] = known.index(value.reason) + 1

    def counts(self) -> dict[str, int]:
        """Return the number of rows by reason."""
        counts = np.bincount(self.numbers, minlength=len(self.faults) + 1)[1:].tolist()
        reasons = (fault.reason for fault in self.faults)
        return {reason: count for reason, count in zip(reasons, counts, strict=True) if count}

    def raise_all(self, rows: Rows, hint: str | None) -> None:
        """Raise ConfigError with a problem for each fault, at its rows, if there is any."""
        problems = list(self._problems(rows, hint))
        if problems:
            raise ConfigError(*problems)

    def _problems(self, rows: Rows, hint: str | None) -> Iterator[Problem]:
        for number, fault in enumerate(self.faults, 1):
            positions = np.flatnonzero(self.numbers == number).tolist()
            if len(positions) > _MAX_PLACES:
                where = f"{rows.place_of(positions[0])} and {len(positions) - 1} more rows"
                yield Problem(fault.message, where, fault.hint or hint)
                continue
            for position in positions:
                yield Problem(fault.message, rows.place_of(position), fault.hint or hint)


def check_fields(rows: Rows, fields: Sequence[RowField]) -> None:
    """Raise ConfigError for rows that lack what an algorithm reads."""
    if fields:
        RowFaults.find(rows, fields).raise_all(rows, None)


def empty_truths(rows: Rows) -> Iterator[str]:
    """Yield a warning if a row has NaN as its truth, or if some rows have an empty text."""
    codes = _codes(rows, _TRUTH)
    if codes is not None:
        found = np.flatnonzero(codes == _EMPTY)
        is_nan = False
    elif len(rows) <= _MAX_DECODED:
        truths = [row.ground_truth for row in rows]
        nans = [isinstance(truth, float) and truth != truth for truth in truths]
        texts = [isinstance(truth, str) and not truth.strip() for truth in truths]
        is_nan = any(nans)
        found = np.flatnonzero(nans if is_nan else texts)
    else:
        return
    if is_nan or 0 < len(found) < len(rows):  # judges and environments may need no truth at all
        kind = "NaN" if is_nan else "empty"
        yield (
            f"the ground_truth of {len(found)} of {len(rows)} training rows is {kind}, first in "
            f"{rows.place_of(int(found[0]))}: a reward that compares with it cannot be right"
        )


def _codes(rows: Rows, path: str, is_number: bool = False) -> np.ndarray | None:
    """Return a code for each row (N,), read from the Arrow columns; None if they cannot tell."""
    parts: list[np.ndarray] = []
    for columns, numbers in rows.columns():
        codes = _column_codes(columns, path, is_number)
        if codes is None:
            return None
        parts.append(codes[numbers])
    return np.concatenate(parts) if parts else None


def _column_codes(columns: Any, path: str, is_number: bool) -> np.ndarray | None:
    import pyarrow.compute
    from pyarrow import types

    pc: Any = pyarrow.compute
    array = _column(columns, path)
    if array is None:
        return None
    kind = array.type
    codes = np.zeros(len(array), np.int8)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    has_numbers = types.is_integer(kind) or (is_number and types.is_floating(kind))
    if is_text and not is_number:
        text = pc.utf8_trim_whitespace(array)
        length = pc.fill_null(pc.binary_length(text), 1)
        codes[pc.equal(length, 0).to_numpy(zero_copy_only=False)] = _EMPTY
        starts = pc.fill_null(pc.starts_with(text, "["), False)  # may be a chat as JSON text
        codes[starts.to_numpy(zero_copy_only=False)] = _DECODE
    elif not (has_numbers or types.is_null(kind)):
        return None
    codes[array.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return codes


def _column(columns: Any, path: str) -> Any:
    """Return the Arrow array at a dotted path in `extra_info`, a struct; None for other columns."""
    import pyarrow as pa
    import pyarrow.compute
    from pyarrow import types

    pc: Any = pyarrow.compute
    first, *parts = (TRUTH_PATH if path == _TRUTH else path).split(".")
    names = columns.schema.names
    known = ("extra_info", TRUTH_PATH.partition(".")[0])
    if first not in known or not parts or first not in names or ENV_CLASS in names:
        return None
    array = columns.column(first)
    for part in parts:
        if not types.is_struct(array.type) or array.type.get_field_index(part) < 0:
            return None
        array = pc.struct_field(array, part)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.large_string()) if str(array.type) == "string_view" else array

"""Data sets of `rlctl prep NAME`: what they declare.

A data set is a function `(params) -> {split: rows}`, found by an entry point of the group
`rlctl.datasets`. Its docstring is the help of the command and the fields of its `Params` are the
command's options; `--out`, `--model`, `--max-prompt-length` and `--json` come from the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field

from rlctl.data_prep.rows import PromptRow, RowSource
from rlctl.plugins import Params, declare

Dataset = Callable[[Any], Mapping[str, RowSource]]
D = TypeVar("D", bound=Dataset)


@dataclass(frozen=True)
class StreamedRows:
    """`count` rows that each loop reads again."""

    count: int
    read: Callable[[], Iterator[PromptRow]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PromptRow]:
        return self.read()


class Splits(dict[str, RowSource]):
    """Rows by split, and how many records of the files were left out because they are invalid."""

    def __init__(self, rows: Mapping[str, RowSource], num_skipped: int) -> None:
        super().__init__(rows)
        self.num_skipped = num_skipped


def dataset(
    params: type[Params],
    example: str,
    *,
    default_out: str | None = None,
    train: Callable[[Any], str | None] | None = None,
) -> Callable[[D], D]:
    """Declare a data set: its settings, an example command line, and the default of `--out`.

    `train` returns the words after `rlctl train` that train on it, without the files, or None.

    A field with `json_schema_extra={"argument": True}` is a positional argument, and "metavar"
    names its value in the help. `--out` is required if `default_out` is None.
    """
    return declare(Params=params, example=example, default_out=default_out, train=train)


def option(default: Any, metavar: str, description: str, **more: Any) -> Any:
    """Return a field of `Params` whose value has the name `metavar` in the help.

    It is required with `...` as its default. `more` are other arguments of pydantic's `Field`.
    """
    extra = {"metavar": metavar, **more.pop("json_schema_extra", {})}
    return Field(default=default, description=description, json_schema_extra=extra, **more)

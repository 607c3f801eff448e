"""Data set from a user's own records of questions and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from rlctl.data_prep.datasets import dataset
from rlctl.data_prep.records import raise_capped, read_records, value_at
from rlctl.data_prep.rows import PromptRow, RowSource
from rlctl.errors import ConfigError, NotFoundError, Problem, UsageError
from rlctl.plugins import Params


@dataclass(frozen=True)
class Fields:
    """Keys of a record's fields, and text for every prompt.

    A dot in a key selects a nested field (`meta.answer`). `system` becomes a system message;
    `instruction` is appended to the last message.
    """

    prompt_key: str
    answer_key: str
    data_source: str
    system: str | None
    instruction: str | None


class JsonlParams(Params):
    """Options of `rlctl prep jsonl`."""

    file: Path = Field(
        description="JSONL, a JSON list, CSV or parquet; one record per problem.",
        json_schema_extra={"metavar": "FILE", "argument": True},
    )
    prompt_key: str = Field(
        description="Key of the prompt: a text, or a list of {role, content}; a dot goes deeper.",
        json_schema_extra={"metavar": "KEY"},
    )
    answer_key: str = Field(
        description="Key of the ground truth for the reward function; a dot goes deeper.",
        json_schema_extra={"metavar": "KEY"},
    )
    data_source: str | None = Field(
        default=None,
        description="Name of the data in metrics and for the reward function; by default the "
        "file's.",
        json_schema_extra={"metavar": "NAME"},
    )
    system: str | None = Field(
        default=None,
        description="A system message before every prompt.",
        json_schema_extra={"metavar": "TEXT"},
    )
    instruction: str | None = Field(
        default=None,
        description="A sentence after every prompt, such as how to end the response.",
        json_schema_extra={"metavar": "TEXT"},
    )
    val_fraction: float = Field(
        default=0.0,
        description="Share of the records that goes to val.parquet.",
        json_schema_extra={"metavar": "P"},
    )
    seed: int = Field(default=0, description="The same seed makes the same files.")


@dataset(
    JsonlParams,
    "rlctl prep jsonl questions.jsonl --prompt-key question --answer-key answer "
    "--out data/mine --val-fraction 0.1",
)
def jsonl(params: JsonlParams) -> dict[str, RowSource]:
    """Your own questions and answers: train.parquet and, with --val-fraction, val.parquet."""
    source = params.data_source or params.file.stem
    fields = Fields(params.prompt_key, params.answer_key, source, params.system, params.instruction)
    return split_source(
        lambda: rows_from_records(params.file, fields), params.val_fraction, params.seed
    )


def split_source(
    read: Callable[[], Iterator[PromptRow]], fraction: float, seed: int, count: int | None = None
) -> dict[str, RowSource]:
    """Split the rows that `read` yields as `split_off` does, without holding them.

    `count` is their number; without it, they are counted.
    """
    if count is None:
        count = sum(1 for _ in read())
    chosen = _validation_indices(count, fraction, seed)
    splits = ("train", "val") if chosen else ("train",)
    return {split: SplitRows(read, split, chosen, count) for split in splits}


@dataclass(frozen=True)
class SplitRows:
    """Rows of a split, read again by each loop."""

    read: Callable[[], Iterator[PromptRow]]
    split: str
    chosen: Collection[int]  # indices of the rows for validation
    count: int  # rows of both splits

    def __len__(self) -> int:
        return len(self.chosen) if self.split == "val" else self.count - len(self.chosen)

    def __iter__(self) -> Iterator[PromptRow]:
        for index, row in enumerate(self.read()):
            if (index in self.chosen) == (self.split == "val"):
                row.extra_info["split"] = self.split
                yield row


def rows_from_records(path: Path, fields: Fields) -> Iterator[PromptRow]:
    """Yield one row per record of a JSONL, JSON-list, CSV or parquet file.

    The prompt is a text or a chat (a list of {role, content}). The answer becomes the ground truth
    and must not be null. `extra_info` has `index` and, for a text, the bare `question`. Raises
    NotFoundError for a missing file, and one ConfigError with the positions of all bad records
    after the last one.
    """
    path = path.expanduser()
    if not path.is_file():
        raise NotFoundError("the file does not exist", where=str(path))
    empty, problems = True, []
    for index, (where, record) in enumerate(read_records(path)):
        try:
            row = _row(record, index, fields)
        except ValueError as error:
            problems.append(Problem(str(error), where))
            continue
        empty = False
        yield row
    raise_capped(problems, path)
    if empty:
        raise ConfigError("the file contains no records", where=str(path))


def split_off(rows: list[PromptRow], fraction: float, seed: int) -> dict[str, list[PromptRow]]:
    """Split rows into `train` and `val`, with a `fraction` of them, chosen by `seed`, in `val`.

    Both keep the file's order; there is no `val` if `fraction` is 0. Sets `extra_info["split"]`.
    Raises UsageError for a fraction that leaves a split empty.
    """
    chosen = _validation_indices(len(rows), fraction, seed)
    splits: dict[str, list[PromptRow]] = {"train": []} | ({"val": []} if chosen else {})
    for index, row in enumerate(rows):
        name = "val" if index in chosen else "train"
        row.extra_info["split"] = name
        splits[name].append(row)
    return splits


def _validation_indices(count: int, fraction: float, seed: int) -> frozenset[int]:
    """Return the indices of the rows for validation. Raises UsageError as `split_off` does."""
    if not 0 <= fraction < 1:
        raise UsageError(
            f"the validation fraction is {fraction}", hint="use a number from 0 to below 1"
        )
    num_val = round(count * fraction)
    if fraction and not 0 < num_val < count:
        raise UsageError(
            f"a validation fraction of {fraction} splits {count} rows "
            f"into {num_val} for validation and {count - num_val} for training"
        )
    return frozenset(random.Random(seed).sample(range(count), num_val))


def _row(record: Any, index: int, fields: Fields) -> PromptRow:
    prompt, answer = value_at(record, fields.prompt_key), value_at(record, fields.answer_key)
    if answer is None:
        raise ValueError(f"{fields.answer_key!r} is null")
    extra_info: dict[str, Any] = {"index": index}
    if isinstance(prompt, str) and prompt.strip():
        extra_info["question"] = prompt
        chat = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(is_message(message) for message in prompt):
        chat = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        raise ValueError(
            f"{fields.prompt_key!r} is {prompt!r:.60}, "
            "expected a non-empty text or list of {role, content}"
        )
    if fields.instruction:
        chat[-1]["content"] = f"{chat[-1]['content']} {fields.instruction}"
    if fields.system:
        chat.insert(0, {"role": "system", "content": fields.system})
    truth = answer if isinstance(answer, str | list | dict) else str(answer)
    return PromptRow(fields.data_source, chat, truth, extra_info=extra_info)


def is_message(message: Any) -> bool:
    """Return whether a value is a message: an object with a text as role and content."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )

"""Data set from a user's records of questions and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from rlctl.data_prep.chat_records import (
    FORMS,
    Chat,
    chat_in,
    is_chat,
    last_response,
    read_chat,
    split_response,
)
from rlctl.data_prep.contract import raise_capped
from rlctl.data_prep.datasets import Splits, StreamedRows, dataset, option
from rlctl.data_prep.decoded_images import require_pillow
from rlctl.data_prep.duplicates import keep_equal_together
from rlctl.data_prep.images import image_faults, read_images
from rlctl.data_prep.message_parts import ASSISTANT, PLACEHOLDER, shortened, with_text
from rlctl.data_prep.record_files import name_of, record_files
from rlctl.data_prep.records import convert, value_at
from rlctl.data_prep.rows import PromptRow, RowSource
from rlctl.data_prep.skipping import report_skipped
from rlctl.data_prep.sources import TRAIN
from rlctl.data_prep.text_files import TextForm, TextParams
from rlctl.errors import Problem, UsageError

_SKIP = "--skip-invalid leaves such records out and counts them"


@dataclass(frozen=True)
class Fields:
    """Keys of a record's fields, and text for every prompt.

    A dot in a key selects a nested field (`meta.answer`). `system` becomes a system message;
    `instruction` is appended to the last message. If the answer's key is None or the prompt's, the
    answer is the last message of the assistant in the prompt, a chat. `image_key` is the images'.
    """

    prompt_key: str
    answer_key: str | None
    data_source: str
    system: str | None
    instruction: str | None
    image_key: str | None = None

    @property
    def takes_last(self) -> bool:
        """True if the answer is the last message of the prompt's chat."""
        return self.answer_key in (None, self.prompt_key)


class JsonlParams(TextParams):
    """Options of `rlctl prep jsonl`."""

    files: list[str] = option(
        ...,
        "FILE",
        "JSONL, JSON lists, CSV or parquet, also 'part-*.jsonl', a folder of a data "
        "set, or owner/name on the hub; one record per problem.",
        json_schema_extra={"argument": True},
    )
    prompt_key: str = option(
        ...,
        "KEY",
        "Key of the prompt: a text, or a chat of {role, content} or {from, value}; a "
        "dot goes deeper.",
    )
    answer_key: str | None = option(
        None,
        "KEY",
        "Key of the ground truth for the reward function; a dot goes deeper. By "
        "default the last message of the assistant in the chat.",
    )
    image_key: str | None = option(
        None,
        "KEY",
        "Key of the images of a record: paths relative to the file, addresses or bytes, which "
        "<image> in the prompt refers to; without it they come first.",
    )
    data_source: str | None = option(
        None,
        "NAME",
        "Name of the data in metrics and for the reward function; by default that "
        "of the file or data set.",
    )
    system: str | None = option(None, "TEXT", "A system message before every prompt.")
    instruction: str | None = option(
        None, "TEXT", "A sentence after every prompt, such as how to end the response."
    )
    skip_invalid: bool = Field(
        default=False,
        description="Leave out, count and name records without prompt or answer, such as lines "
        "with an empty cell.",
    )
    val_fraction: float = option(0.0, "P", "Share of the records that goes to val.parquet.")
    seed: int = Field(default=0, description="The same seed makes the same files.")


@dataset(
    JsonlParams,
    "rlctl prep jsonl questions.jsonl --prompt-key question --answer-key answer "
    "--out data/mine --val-fraction 0.1",
)
def jsonl(params: JsonlParams) -> dict[str, RowSource]:
    """Your questions and answers: train.parquet and, with --val-fraction, val.parquet."""
    files = record_files(params.files, TRAIN)
    source = params.data_source or name_of(params.files)
    keys = (params.prompt_key, params.answer_key, source, params.system, params.instruction)
    fields = Fields(*keys, params.image_key)
    if params.image_key is not None:
        require_pillow("--image-key")
    form = params.form()

    def read(skipped: list[Problem]) -> Iterator[PromptRow]:
        if params.skip_invalid:
            return rows_from_records(files, fields, form, skipped)
        return rows_from_records(files, fields, form, None)

    skipped: list[Problem] = []
    count = sum(1 for _ in read(skipped))
    report_skipped(skipped, count + len(skipped))
    if not count:
        raise_capped(skipped, files[0])
    rows = split_source(lambda: read([]), params.val_fraction, params.seed, count)
    return Splits(rows, len(skipped))


def split_source(
    read: Callable[[], Iterator[PromptRow]], fraction: float, seed: int, count: int | None = None
) -> dict[str, RowSource]:
    """Split the rows that `read` yields into `train` and `val`, without holding them.

    A `fraction` of them, chosen by `seed`, is in `val`; there is none if `fraction` is 0. No equal
    rows are divided. Both keep the order, and set `extra_info["split"]`. `count` is the number of
    rows; without it, they are counted. Raises UsageError for a fraction that leaves a split empty.
    """
    if count is None:
        count = sum(1 for _ in read())
    chosen = _validation_indices(count, fraction, seed)
    if chosen:
        chosen = keep_equal_together(read(), chosen)
    splits = ["train"]
    if chosen:
        splits.append("val")
    sizes = {"train": count - len(chosen), "val": len(chosen)}

    def part(split: str) -> Iterator[PromptRow]:
        is_val = split == "val"
        rows = (row for index, row in enumerate(read()) if (index in chosen) == is_val)
        return labelled(rows, split)

    return {split: StreamedRows(sizes[split], partial(part, split)) for split in splits}


def labelled(rows: Iterable[PromptRow], split: str) -> Iterator[PromptRow]:
    """Yield rows with the name of their split."""
    for row in rows:
        row.extra_info["split"] = split
        yield row


def rows_from_records(
    files: Sequence[Path],
    fields: Fields,
    form: TextForm | None = None,
    skipped: list[Problem] | None = None,
) -> Iterator[PromptRow]:
    """Yield one row per record of JSONL, JSON-list, CSV or parquet files.

    The prompt is a text or a chat, without the assistant's last message if that ends it. The answer
    becomes the ground truth and must not be null. `extra_info` has `index`, the bare `question` of
    a text, the `answer` that ended a chat, and all other columns. `form` is that of text files.
    Raises one ConfigError with the positions of all bad records of a file after its last one, or
    appends their problems to `skipped`.
    """
    return convert(
        files,
        lambda record, index, path: with_images(
            row_of(record, index, fields), fields.image_key, record, path.parent
        ),
        _SKIP,
        skipped,
        form or TextForm(),
    )


def _validation_indices(count: int, fraction: float, seed: int) -> frozenset[int]:
    """Return the indices of the rows for validation. Raises UsageError as `split_source` does."""
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


def row_of(record: Any, index: int, fields: Fields) -> PromptRow:
    """Return the row of one record. Raises ValueError for one that is no problem."""
    prompt = _opened(value_at(record, fields.prompt_key))
    extra_info = _other_columns(record, fields)
    chat = _chat(prompt, fields)
    answer = None
    if isinstance(prompt, str):
        extra_info = {"question": prompt, **extra_info}
    elif fields.takes_last or (len(chat) > 1 and chat[-1]["role"] == ASSISTANT):
        chat, answer = split_response(chat, fields.prompt_key)
        extra_info = {"answer": answer, **extra_info}
    if fields.answer_key is not None and not fields.takes_last:
        answer = value_at(record, fields.answer_key)
    if answer is None or answer != answer:  # NaN: pandas writes it for a missing number
        raise ValueError(f"{fields.answer_key!r} is null")
    answer = _opened(answer)
    if is_chat(answer):
        answer = last_response(read_chat(answer, str(fields.answer_key)), str(fields.answer_key))
    if fields.instruction:
        chat[-1]["content"] = f"{chat[-1]['content']} {fields.instruction}"
    if fields.system:
        chat.insert(0, {"role": "system", "content": fields.system})
    if not isinstance(answer, str | list | dict):
        answer = str(answer)
    return PromptRow(fields.data_source, chat, answer, extra_info={"index": index, **extra_info})


def _opened(value: Any) -> Any:
    """Return the chat in a JSON text, any other value as it is."""
    if not isinstance(value, str):
        return value
    return chat_in(value) or value


def with_images(row: PromptRow, key: str | None, record: Any, folder: Path) -> PromptRow:
    """Return the row with the images at `key` of its record; unchanged if that is None.

    Raises ValueError if its prompt refers to others.
    """
    if key is None:
        return row
    images = read_images(value_at(record, key), folder)
    if not any(PLACEHOLDER in turn["content"] for turn in row.prompt):
        asked = next((turn for turn in row.prompt if turn["role"] != "system"), row.prompt[-1])
        asked["content"] = PLACEHOLDER * len(images) + asked["content"]
    for fault in image_faults(images, key, [turn["content"] for turn in row.prompt]):
        raise ValueError(fault)
    return replace(row, images=images)


def _chat(prompt: Any, fields: Fields) -> Chat:
    """Return the messages of a prompt. Raises ValueError for one that cannot be read."""
    if is_chat(prompt):
        if fields.image_key is not None:  # content parts refer to images, too
            prompt = list(map(with_text, prompt))
        return read_chat(prompt, fields.prompt_key)
    if prompt is None:
        raise ValueError(f"{fields.prompt_key!r} is null")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            f"{fields.prompt_key!r} is {shortened(prompt)}, expected a non-empty text or {FORMS}"
        )
    if fields.takes_last:
        raise ValueError(f"{fields.prompt_key!r} is a text: name the answers with --answer-key")
    return [{"role": "user", "content": prompt}]


def _other_columns(record: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the columns without prompt and answer, as JSON has them; `extra_info` is opened."""
    used = ("index", fields.prompt_key, fields.answer_key, fields.image_key)
    found = {name: _plain(value) for name, value in record.items() if name not in used}
    nested = found.pop("extra_info", None)
    if isinstance(nested, dict):
        return {**found, **{name: item for name, item in nested.items() if name not in used}}
    if nested is not None:
        found["extra_info"] = nested
    return found


def _plain(value: Any) -> Any:
    """Return a value of a column as one that JSON has: dates as text, bytes as their number."""
    match value:
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case None | str() | bool() | int() | float():
            return value
        case bytes():
            return f"<{len(value)} bytes>"
        case _:
            return str(value)

"""Data that `rlctl new` reads: records of any columns, the columns that fit, rows made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlctl.data_prep.chat_records import ends_with_response, is_chat
from rlctl.data_prep.contract import CHATS, raise_capped, row_faults
from rlctl.data_prep.datasets import StreamedRows
from rlctl.data_prep.decoded_images import require_pillow
from rlctl.data_prep.images import images_of
from rlctl.data_prep.question_records import (
    Fields,
    labelled,
    row_of,
    rows_from_records,
    split_source,
)
from rlctl.data_prep.record_files import VALIDATIONS, name_of, record_files, split_files
from rlctl.data_prep.records import read_records
from rlctl.data_prep.rows import PromptRow, RowSource, stream_rows
from rlctl.data_prep.skipping import report_skipped
from rlctl.data_prep.sources import RAW_SUFFIXES, TRAIN
from rlctl.data_prep.text_files import TextForm
from rlctl.errors import ConfigError, Problem
from rlctl.storage import is_url

_SAMPLE = 100  # records that are looked at
_MAX_VALIDATION = 500  # rows that are split off; a tenth of the records at most
_PROMPTS = (
    *("prompt", "question", "problem", *CHATS, "query", "instruction", "input"),
    *("frage", "aufgabe", "pregunta", "pergunta", "domanda", "вопрос", "问题", "質問"),
)
_ANSWERS = (
    *("reward_model.ground_truth", "ground_truth", "final_answer", "answer", "solution"),
    *("target", "label", "expected", "output", "response", "completion"),
    *("antwort", "lösung", "loesung", "ergebnis", "réponse", "reponse", "respuesta", "resposta"),
    *("risposta", "ответ", "答案", "答え"),
)
_IMAGES = ("images", "image")
_NUMBER = re.compile(r"\s*[-+]?[$€£]?\d[\d,]*(?:\.\d+)?%?\s*")
_MARK = "####"
_BOXED = "\\boxed{"


@dataclass(frozen=True)
class RawData:
    """Files of records, and a sample of them."""

    source: str
    training: Sequence[Path]
    validation: Sequence[Path]  # empty: a part of the training records is split off
    records: Sequence[dict[str, Any]]
    form: TextForm = field(default_factory=TextForm)  # of text files

    @property
    def name(self) -> str:
        """Name of the source."""
        return name_of([self.source])

    def columns(self) -> dict[str, Any]:
        """Return a value of each column of the sample, and of each field (`reward_model.style`)."""
        values: dict[str, Any] = {}
        for record in self.records:
            for name, value in record.items():
                fields = {name: value}
                if isinstance(value, dict):
                    fields |= {f"{name}.{key}": item for key, item in value.items()}
                for path, item in fields.items():
                    if values.get(path) is None:
                        values[path] = item
        return values

    @property
    def image_key(self) -> str | None:
        """Column of the images, by its name and values, or None."""
        for name in _IMAGES:
            with suppress(ValueError):
                if any(images_of(record.get(name)) for record in self.records):
                    require_pillow(f"the column {name!r}")
                    return name
        return None

    def suggest_prompt(self) -> str | None:
        """Return the column that holds the prompts, by its name, or None."""
        return _first(_PROMPTS, self._names("text", "chat"))

    def suggest_answer(self, prompt: str) -> str | None:
        """Return the column that holds the answers: by its name, or the only one left.

        It is the prompt's if the chat there ends with a message of the assistant.
        """
        left = [name for name in self._names("text", "number") if name != prompt]
        if named := _first(_ANSWERS, left):
            return named
        if ends_with_response(self.columns().get(prompt)):
            return prompt
        if len(left) != 1:
            return None
        return left[0]

    def guess_prompt(self) -> str | None:
        """Return the column with the longest texts, or None: a default for who is asked."""
        lengths = {
            name: sum(len(str(record.get(name) or "")) for record in self.records)
            for name in self._names("text", "chat")
        }
        return max(lengths, key=lambda name: lengths[name], default=None)

    def guess_answer(self, prompt: str) -> str | None:
        """Return the column after the prompt's, or the first other one, or None."""
        names = self._names("text", "number")
        others = [name for name in names if name != prompt]
        if prompt in names:
            others = [*names[names.index(prompt) + 1 :], *others]
        return next(iter(others), None)

    def _names(self, *kinds: str) -> list[str]:
        return [name for name, value in self.columns().items() if kind_of(value) in kinds]


def find_raw(source: str, validation: str | None, form: TextForm | None = None) -> RawData:
    """Find the files of a source, and those for validation, and read the first records.

    A source is a file, a folder of a data set (files by split, as on the hub or as
    `datasets.save_to_disk` writes them), or `owner/name` on the hub; `:SPLIT` selects a split.
    `form` is that of text files.
    Raises NotFoundError for one that does not exist, ConfigError for one without records.
    """
    training = _files(source, TRAIN)
    held_out: list[Path] = []
    if validation is not None:
        held_out = _files(validation, VALIDATIONS[-1])
    elif not (is_url(source) or training == [Path(source).expanduser()]) and (
        ":" not in source or source.endswith("/")
    ):
        held_out = next(filter(None, (split_files(source, split) for split in VALIDATIONS)), [])
        if held_out == training:
            held_out = []
    form = form or TextForm()
    wrong: list[Problem] = []
    read = chain.from_iterable(read_records(file, form, wrong) for file in training)
    records = [record for _, record in islice(read, _SAMPLE)]
    if not records:
        raise_capped(wrong, training[0])
        raise ConfigError("the data has no records", where=source)
    if not all(isinstance(record, dict) for record in records):
        raise ConfigError("the records are no objects with named fields", where=source)
    return RawData(source, training, held_out, records, form)


def _files(source: str, split: str) -> list[Path]:
    """Return the files of a split, whose kind is known; all of a folder that has no splits."""
    files = record_files([source], split)
    for file in files:
        if file.suffix.lower() not in RAW_SUFFIXES:
            raise ConfigError(
                f"the data is a file of an unknown kind, {file.suffix!r}",
                where=str(file),
                hint=f"kinds that are read: {', '.join(RAW_SUFFIXES)}",
            )
    return files


def kind_of(value: Any) -> str:
    """Return the kind of a column with this value: text, chat, number or other."""
    if isinstance(value, str):
        return "text"
    if is_chat(value):
        return "chat"
    if isinstance(value, int | float):
        return "number"
    return "other"


def _first(names: Iterable[str], columns: Sequence[str]) -> str | None:
    by_name = {column.lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in names if name in by_name), None)


def is_number(text: str) -> bool:
    """Return True for one number, such as -1,200.50 or $3."""
    return _NUMBER.fullmatch(text) is not None


def final_answer(solution: str) -> str:
    r"""Return the text after the last `####`, or in the last \boxed{}; else the whole text."""
    if _MARK in solution:
        return solution.rpartition(_MARK)[2].strip()
    _, boxed, text = solution.rpartition(_BOXED)
    if not boxed:
        return solution.strip()
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:end].strip()
    return solution.strip()


@dataclass(frozen=True)
class RowMaker:
    """Conversion of records to rows; rows of verl's layout keep all their fields.

    `instruction` is added to every prompt. `whole` keeps solutions instead of final answers.
    """

    data: RawData
    fields: Fields
    instruction: str = ""
    whole: bool = False

    def answers(self) -> list[str]:
        """Return the final answers of the sample. Raises ConfigError if no record has one."""
        rows: list[PromptRow] = []
        for record in self.data.records:
            with suppress(ValueError):  # it is left out, or reported with its line
                rows.append(row_of(record, 0, self.fields))
        if not rows:
            self._count(self.data.training)  # raises
        return [final_answer(str(row.ground_truth)) for row in rows]

    def splits(self) -> dict[str, RowSource]:
        """Return the rows for training (`train`) and validation (`val`), which are streamed.

        Records without a prompt or an answer are left out and reported. Raises ConfigError if they
        are more than the others.
        """
        train, val = (
            partial(self._rows, files) for files in (self.data.training, self.data.validation)
        )
        count = self._count(self.data.training)
        if self.data.validation:
            rows = StreamedRows(self._count(self.data.validation), lambda: labelled(val(), "val"))
            return split_source(train, 0.0, 0, count) | {"val": rows}
        if count < 2:
            raise ConfigError(
                "the data has one record, which cannot be both for training and for validation",
                where=str(self.data.training[0]),
                hint="--val FILE",
            )
        size = min(_MAX_VALIDATION, max(1, count // 10))
        return split_source(train, size / count, 0, count)

    def first(self, count: int) -> list[PromptRow]:
        """Return the first rows for training."""
        return list(islice(self._rows(self.data.training), count))

    def _count(self, files: Sequence[Path]) -> int:
        """Return the number of rows; report the records that are left out."""
        skipped: list[Problem] = []
        count = sum(1 for _ in self._rows(files, skipped))
        if len(skipped) > count:
            raise_capped(skipped, files[0])
        report_skipped(skipped, count + len(skipped))
        return count

    def _rows(
        self, files: Sequence[Path], skipped: list[Problem] | None = None
    ) -> Iterator[PromptRow]:
        """Yield rows without an assistant's last message, and with the final answer.

        Problems of records that are left out are appended to `skipped`.
        """
        keys = (self.fields.prompt_key, self.fields.answer_key)
        if keys == (_PROMPTS[0], _ANSWERS[0]) and not row_faults(
            self.data.records[0], "prompt", "data_source"
        ):  # rows already
            rows = chain.from_iterable(map(stream_rows, files))
        else:
            if skipped is None:
                skipped = []
            rows = rows_from_records(files, self.fields, self.data.form, skipped)
        for index, row in enumerate(rows):
            row.extra_info["index"] = index
            chat = row.prompt
            truth = row.ground_truth
            if len(chat) > 1 and chat[-1]["role"] == "assistant":
                chat = chat[:-1]
            if self.instruction:
                text = f"{chat[-1]['content']} {self.instruction}"
                chat = [*chat[:-1], chat[-1] | {"content": text}]
            if isinstance(truth, str) and not self.whole:
                truth = final_answer(truth)
            yield replace(row, prompt=chat, ground_truth=truth)

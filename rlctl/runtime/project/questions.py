"""Questions of `rlctl new` about a user's records, with suggestions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data_prep.jsonl import Fields
from rlctl.data_prep.raw_data import RawData, RowMaker, find_raw, is_number, kind_of
from rlctl.data_prep.records import value_at
from rlctl.errors import UsageError
from rlctl.plugins import require
from rlctl.quickstart import NAME, VISION
from rlctl.runtime.project.rewards import OWN, REWARDS
from rlctl.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_HUB_VISION = "Qwen/Qwen3-VL-2B-Instruct"

Ask = Callable[[str, str | None, Callable[[str], Any]], Any]  # text, suggestion, parser


class Answers:
    """Answers to the questions in their order; suggestions follow from earlier answers.

    `announce` is called before something slow. An open answer is None.
    """

    data: str | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    reward: str | None = None
    model: str | None = None
    devices: int | None = None
    raw: RawData | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, val: str | None, announce: Callable[[str], None]) -> None:
        self.val = val
        self._announce = announce
        self._missing: dict[str, str | None] = {}  # option → suggestion

    def fill(
        self,
        questions: Sequence[Question],
        options: Mapping[str, str | None],
        accept: bool,
        ask: Ask | None,
    ) -> None:
        """Answer questions from the options; with `accept` from suggestions; else by asking.

        Without `ask` a question is missing, and a suggestion is its answer for the time being, so
        that others can follow from it. Raises the errors of answers that cannot be used.
        """
        for question in questions:
            parse = partial(question.parse, self)
            text, suggestion = options[question.name], question.suggest(self)
            if text is None and accept:
                text = suggestion
            if text is None and ask is not None:
                setattr(self, question.name, ask(question.text, suggestion, parse))
                continue
            if text is None and accept and None in map(self.__getattribute__, question.needs):
                continue  # what it needs is missing
            if text is None:
                self._missing[question.option] = text = suggestion
            if text is not None:
                setattr(self, question.name, parse(text))

    def raise_missing(self) -> None:
        """Raise UsageError with all missing options, their suggestions, and the columns, if any."""
        if not self._missing:
            return
        known = [
            f"{option.partition(' ')[0]} {suggestion}"
            for option, suggestion in self._missing.items()
            if suggestion is not None
        ]
        hint = "nothing is asked without a terminal"
        if known:
            hint += f"; --yes accepts the suggestions: {' '.join(known)}"
        if self.raw and not (self.prompt_key and self.answer_key):
            columns = [f"{column.name} ({column.kind})" for column in self.raw.columns()]
            hint += f"; columns: {', '.join(columns)}"
        raise UsageError(f"missing options: {', '.join(self._missing)}", hint=hint)

    def read_data(self, text: str) -> str:
        """Find the data and read a sample of it."""
        self.raw = find_raw(text, self.val)
        return text

    def read_column(self, text: str, kinds: tuple[str, ...]) -> str:
        """Return the column that a name, or a number of the list, selects. Raises UsageError."""
        if self.raw is None:
            return text
        columns = self.raw.columns()
        names = [column.name for column in columns]
        if text not in names and text.isdecimal() and 0 < int(text) <= len(names):
            text = names[int(text) - 1]
        fitting = ", ".join(column.name for column in columns if column.kind in kinds)
        hint = f"columns of that kind: {fitting or 'none'}"
        try:
            kind = kind_of(value_at(self.raw.records[0], text))
        except ValueError as error:
            near = did_you_mean(text, names)
            raise UsageError(f"no column {text!r}", hint=near or hint) from error
        if kind not in kinds:
            raise UsageError(f"the column {text!r} has no {' or '.join(kinds)}", hint=hint)
        return text

    def suggest_reward(self) -> str | None:
        """Return the kind of reward that fits the answers."""
        if self.raw is None or self.prompt_key is None or self.answer_key is None:
            return None
        answers = self._rows.answers()
        if all(map(is_number, answers)):
            return "number"
        return "math" if any("\\" in answer for answer in answers) else "exact"

    def read_reward(self, text: str) -> str:
        """Return a known kind of reward whose package is installed."""
        if text not in REWARDS:
            raise UsageError(f"no kind of reward {text!r}", hint=f"kinds: {', '.join(REWARDS)}")
        if text == "math":
            require("math_verify", "rewards for mathematics need math-verify", "math")
        return text

    def suggest_model(self) -> str:
        """Return a model that fits the devices and the data."""
        if self.raw is not None and self.raw.image_key is not None:
            return _HUB_VISION if _num_gpus() else VISION
        return _HUB_MODEL if _num_gpus() else NAME

    def read_model(self, text: str) -> str:
        """Load the tokenizer of a model, unless options are missing. Raises ConfigError."""
        if not self._missing:
            self._announce(f"reading the tokenizer of {text}")
            from rlctl.runtime.data.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(text)
        return text

    def rows(self, instruction: str | None) -> RowMaker:
        """Return the conversion of the data, with a sentence after every prompt."""
        text = REWARDS[self.reward or OWN][1] if instruction is None else instruction
        return replace(self._rows, instruction=text, whole=self.reward == OWN)

    @property
    def default_folder(self) -> Path:
        """Folder with the name of the data."""
        return Path(self._rows.data.name)

    @property
    def _rows(self) -> RowMaker:
        assert self.raw is not None, "asked for first"
        keys = self.prompt_key or "", self.answer_key, self.raw.name
        fields = Fields(*keys, None, None, self.raw.image_key)
        return RowMaker(self.raw, fields)


def _num_gpus() -> int:
    from rlctl.runtime.cluster.nvidia import visible_gpus

    return len(visible_gpus())


def _read_count(_: Answers, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"{text!r} is no number of devices", hint="1 or more")
    return int(text)


@dataclass(frozen=True)
class Question:
    """Question whose answer is the attribute `name` of `Answers`, after those it `needs`."""

    name: str
    option: str
    text: str
    suggest: Callable[[Answers], str | None]
    parse: Callable[[Answers, str], Any]
    needs: tuple[str, ...] = ()


DATA = Question(
    *("data", "--data FILE", "Data: a file, the folder of a data set, or owner/name on the hub"),
    lambda _: None,
    Answers.read_data,
)
QUESTIONS = (
    Question(
        *("prompt_key", "--prompt-key COLUMN", "Column of the prompts"),
        lambda answers: answers.raw and answers.raw.suggest_prompt(),
        partial(Answers.read_column, kinds=("text", "chat")),
        ("data",),
    ),
    Question(
        *("answer_key", "--answer-key COLUMN", "Column of the right answers"),
        lambda answers: answers.raw and answers.raw.suggest_answer(answers.prompt_key or ""),
        partial(Answers.read_column, kinds=("text", "number", "chat")),
        ("data",),
    ),
    Question(
        *("reward", "--reward KIND"),
        "Rewarded: " + ", ".join(f"{kind} ({text})" for kind, (text, _) in REWARDS.items()),
        Answers.suggest_reward,
        Answers.read_reward,
        ("prompt_key", "answer_key"),
    ),
    Question(
        *("model", "--model DIR"),
        "Model: a folder, owner/name on the hub, or quickstart (small, inside rlctl)",
        Answers.suggest_model,
        Answers.read_model,
    ),
    Question(
        *("devices", "--devices N", "GPUs, or processes on a CPU"),
        lambda _: str(_num_gpus() or 1),
        _read_count,
    ),
)

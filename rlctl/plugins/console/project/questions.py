"""Questions of `rlctl new` about a user's records, with suggestions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlctl.data_prep.question_records import Fields
from rlctl.data_prep.raw_data import RawData, RowMaker, is_number, kind_of
from rlctl.data_prep.records import value_at
from rlctl.errors import UsageError
from rlctl.packages import require
from rlctl.plugins.console.project.rewards import OWN, REWARDS
from rlctl.quickstart import NAME, VISION
from rlctl.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_HUB_VISION = "Qwen/Qwen3-VL-2B-Instruct"
_KINDS = ", ".join(f"{kind} ({text})" for kind, (text, _) in REWARDS.items())
# Option and text of each question.
_QUESTIONS = {
    "data": ("--data FILE", "Data: a file, the folder of a data set, or owner/name on the hub"),
    "prompt_key": ("--prompt-key COLUMN", "Column of the prompts"),
    "answer_key": ("--answer-key COLUMN", "Column of the right answers"),
    "reward": ("--reward KIND", f"Rewarded: {_KINDS}"),
    "model": (
        "--model DIR",
        "Model: a folder, owner/name on the hub, or quickstart (small, inside rlctl)",
    ),
    "devices": ("--devices N", "GPUs, or processes on a CPU"),
}

Ask = Callable[[str, str | None, Callable[[str], Any]], Any]  # text, suggestion, parser


@dataclass(frozen=True)
class Answers:
    """Answers to all questions; `rows` makes the rows, without an instruction."""

    rows: RowMaker
    reward: str
    model: str
    tokenizer: PreTrainedTokenizerBase
    devices: int

    def rows_with(self, instruction: str | None) -> RowMaker:
        """Return the conversion of the data, with a sentence after every prompt."""
        text = REWARDS[self.reward][1] if instruction is None else instruction
        return replace(self.rows, instruction=text, whole=self.reward == OWN)


@dataclass
class Interview:
    """Questions in their order, answered by options, with `accept` by suggestions, or by asking.

    Without `ask` a question is missing, and a suggestion is its answer for the time being, so that
    others can follow from it. `announce` is called before something slow.
    """

    options: Mapping[str, str | None]
    accept: bool
    ask: Ask | None
    announce: Callable[[str], None]
    _missing: dict[str, str | None] = field(default_factory=dict)  # option → suggestion

    def find_data(self, find: Callable[[str], RawData]) -> RawData | None:
        """Return the data that `find` reads a sample of by its name; None if it is missing."""
        return self._answer("data", None, find)

    def finish(self, raw: RawData | None) -> Answers:
        """Answer the other questions.

        Raises the error of an answer that cannot be used, and UsageError with all missing options.
        """
        asks = self.ask is not None and not self.accept
        suggestion = raw and (raw.suggest_prompt() or (raw.guess_prompt() if asks else None))
        prompt = self._answer_column("prompt_key", raw, suggestion, "text", "chat")
        suggestion = raw and raw.suggest_answer(prompt or "")
        if raw is not None and suggestion is None and asks:
            suggestion = raw.guess_answer(prompt or "")
        answer = self._answer_column("answer_key", raw, suggestion, "text", "number", "chat")
        has_columns = prompt is not None and answer is not None
        rows = None
        if raw is not None and prompt is not None and answer is not None:
            fields = Fields(prompt, answer, raw.name, None, None, raw.image_key)
            rows = RowMaker(raw, fields)
        reward = self._answer("reward", rows and _suggest_reward(rows), _read_reward, has_columns)
        model, tokenizer = self._answer("model", _suggest_model(raw), self._read_model)
        devices = self._answer("devices", str(_num_gpus() or 1), _read_count)
        self._raise_missing(raw, has_columns)
        assert rows is not None, "nothing is missing"
        return Answers(rows, reward, model, tokenizer, devices)

    def _answer_column(
        self, name: str, raw: RawData | None, suggestion: str | None, *kinds: str
    ) -> str | None:
        def parse(text: str) -> str:
            return text if raw is None else _read_column(raw, text, kinds)

        return self._answer(name, suggestion, parse, raw is not None)

    def _answer(
        self, name: str, suggestion: str | None, parse: Callable[[str], Any], is_known: bool = True
    ) -> Any:
        """Return the answer to a question; None if it is missing, or unless `is_known` for now."""
        option, question = _QUESTIONS[name]
        text = self.options[name]
        if text is None and self.accept:
            text = suggestion
        if text is None and self.ask is not None:
            return self.ask(question, suggestion, parse)
        if text is None and self.accept and not is_known:
            return None  # what it needs is missing
        if text is None:
            self._missing[option] = text = suggestion
        return None if text is None else parse(text)

    def _raise_missing(self, raw: RawData | None, has_columns: bool) -> None:
        """Raise UsageError with all missing options, their suggestions, and the columns, if any."""
        if not self._missing:
            return
        hint = "nothing is asked without a terminal"
        if known := [
            f"{option.partition(' ')[0]} {suggestion}"
            for option, suggestion in self._missing.items()
            if suggestion is not None
        ]:
            hint += f"; --yes accepts the suggestions: {' '.join(known)}"
        if raw and not has_columns:
            columns = [f"{name} ({kind_of(value)})" for name, value in raw.columns().items()]
            hint += f"; columns: {', '.join(columns)}"
        raise UsageError(f"missing options: {', '.join(self._missing)}", hint=hint)

    def _read_model(self, text: str) -> tuple[str, PreTrainedTokenizerBase | None]:
        """Load the tokenizer of a model, unless options are missing. Raises ConfigError."""
        if self._missing:
            return text, None
        self.announce(f"reading the tokenizer of {text}")
        from rlctl.runtime.data.tokenizer import load_tokenizer

        return text, load_tokenizer(text)


def _read_column(raw: RawData, text: str, kinds: tuple[str, ...]) -> str:
    """Return the column that a name, or a number of the list, selects. Raises UsageError."""
    columns = raw.columns()
    names = list(columns)
    if text not in names and text.isdecimal() and 0 < int(text) <= len(names):
        text = names[int(text) - 1]
    fitting = ", ".join(name for name, value in columns.items() if kind_of(value) in kinds)
    hint = f"columns of that kind: {fitting or 'none'}"
    try:
        value = columns.get(text)  # the first that is not empty
        kind = kind_of(value_at(raw.records[0], text) if value is None else value)
    except ValueError as error:
        near = did_you_mean(text, names)
        raise UsageError(f"no column {text!r}", hint=near or hint) from error
    if kind not in kinds:
        raise UsageError(f"the column {text!r} has no {' or '.join(kinds)}", hint=hint)
    return text


def _suggest_reward(rows: RowMaker) -> str:
    """Return the kind of reward that fits the answers."""
    answers = rows.answers()
    if all(map(is_number, answers)):
        return "number"
    return "math" if any("\\" in answer for answer in answers) else "exact"


def _read_reward(text: str) -> str:
    """Return a known kind of reward whose package is installed."""
    if text not in REWARDS:
        raise UsageError(f"no kind of reward {text!r}", hint=f"kinds: {', '.join(REWARDS)}")
    if text == "math":
        require("math_verify", "rewards for mathematics need math-verify", "math")
    return text


def _suggest_model(raw: RawData | None) -> str:
    """Return a model that fits the devices and the data."""
    has_gpus = _num_gpus() > 0
    if raw is not None and raw.image_key is not None:
        return _HUB_VISION if has_gpus else VISION
    return _HUB_MODEL if has_gpus else NAME


def _num_gpus() -> int:
    from rlctl.runtime.cluster.nvidia import visible_gpus

    return len(visible_gpus())


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"{text!r} is no number of devices", hint="1 or more")
    return int(text)

"""Answers that `rlctl new` needs: from options, suggestions, or questions on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cli.questions import Questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.data_prep.raw_data import Column, RawData, RowMaker

_HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@dataclass(frozen=True)
class Options:
    """Options of the command; None is open."""

    folder: Path | None
    data: str | None
    val: str | None
    prompt_key: str | None
    answer_key: str | None
    reward: str | None
    model: str | None
    devices: int | None
    instruction: str | None
    force: bool


@dataclass(frozen=True)
class Chosen:
    """Answers to all questions."""

    folder: Path
    source: str
    maker: RowMaker
    reward: str
    model: str
    tokenizer: PreTrainedTokenizerBase
    devices: int


def choose(questions: Questions, options: Options) -> Chosen:
    """Return the answers, given or asked for.

    Raises UsageError with all missing options, ConflictError for a folder whose files would be
    overwritten.
    """
    from rlctl.data_prep.jsonl import Fields
    from rlctl.data_prep.raw_data import RowMaker, find_raw
    from rlctl.runtime.rewards.stubs import KINDS

    _refuse_existing(options.folder, options.force)
    found = questions.answer(
        "--data FILE",
        options.data,
        "Data: a file, the folder of a data set, or owner/name on the hub",
        None,
        lambda text: (text, find_raw(text, options.val)),
    )
    source, raw = found or ("", None)
    prompt, answer = _columns(questions, options, raw)
    likely, reward = _likely_reward(raw, prompt, answer), None
    if options.reward or likely or not questions.accepts:  # else it follows from the columns
        reward = questions.answer(
            "--reward KIND",
            options.reward,
            "Rewarded: " + ", ".join(f"{kind} ({text})" for kind, (text, _) in KINDS.items()),
            likely,
            _reward,
        )
    model, devices = _model_and_devices(questions, options)
    if questions.any_missing or not (raw and prompt and answer and reward and model and devices):
        raise questions.missing(_listed(raw) if raw and not (prompt and answer) else "")
    folder = options.folder or Path(raw.name)
    _refuse_existing(folder, options.force)
    maker = RowMaker(
        raw,
        Fields(prompt, answer, raw.name, None, None),
        KINDS[reward][1] if options.instruction is None else options.instruction,
        whole=reward == list(KINDS)[-1],
    )
    return Chosen(folder, source, maker, reward, model, _tokenizer(model), devices)


def _columns(
    questions: Questions, options: Options, raw: RawData | None
) -> tuple[str | None, str | None]:
    """Return the columns of prompts and of answers."""
    from rlctl.cli.views.new import print_columns
    from rlctl.data_prep.raw_data import suggest_answer, suggest_prompt

    if raw is None and questions.accepts:  # what the data has may fit
        return options.prompt_key, options.answer_key
    columns = raw.columns() if raw else []
    if raw and questions.on_terminal and None in (options.prompt_key, options.answer_key):
        print_columns(columns)
    prompt = questions.answer(
        "--prompt-key COLUMN",
        options.prompt_key,
        "Column of the prompts",
        suggest_prompt(columns),
        lambda text: _column(text, raw, columns, ("text", "chat")),
    )
    answer = questions.answer(
        "--answer-key COLUMN",
        options.answer_key,
        "Column of the right answers",
        suggest_answer(columns, prompt or ""),
        lambda text: _column(text, raw, columns, ("text", "number", "chat")),
    )
    return prompt, answer


def _listed(raw: RawData) -> str:
    """Return the columns of the data and their kinds, for an error."""
    return f"; columns: {', '.join(f'{each.name} ({each.kind})' for each in raw.columns())}"


def _model_and_devices(questions: Questions, options: Options) -> tuple[str | None, int | None]:
    """Return the model, whose tokenizer can be loaded, and the number of devices."""
    gpus = _num_gpus()
    model = questions.answer(
        "--model DIR",
        options.model,
        "Model: a folder, owner/name on the hub, or quickstart (small, inside rlctl)",
        _HUB_MODEL if gpus else "quickstart",
        lambda text: text if questions.any_missing else _model(text),
    )
    devices = questions.answer(
        "--devices N",
        None if options.devices is None else str(options.devices),
        "GPUs, or processes on a CPU",
        str(gpus or 1),
        _count,
    )
    return model, devices


def _refuse_existing(folder: Path | None, force: bool) -> None:
    """Raise ConflictError if the recipe or another file of the folder exists."""
    from rlctl.errors import ConflictError

    if folder is None or force:
        return
    names = (f"{folder.name}.yaml", "reward.py", "train.parquet", "val.parquet")
    there = [str(folder / name) for name in names if (folder / name).exists()]
    if there:
        raise ConflictError(
            f"existing files would be overwritten: {', '.join(there)}",
            hint="name another folder, or overwrite them with --force",
        )


def _column(
    text: str, raw: RawData | None, columns: Sequence[Column], kinds: tuple[str, ...]
) -> str:
    """Return the column that a name, or a number of the list, selects. Raises UsageError."""
    from rlctl.data_prep.raw_data import kind_of
    from rlctl.data_prep.records import value_at
    from rlctl.errors import UsageError
    from rlctl.suggest import did_you_mean

    names = [each.name for each in columns]
    if raw is None:
        return text
    if text not in names and text.isdecimal() and 0 < int(text) <= len(names):
        text = names[int(text) - 1]
    fitting = ", ".join(each.name for each in columns if each.kind in kinds)
    hint = f"columns of that kind: {fitting or 'none'}"
    try:
        kind = kind_of(value_at(raw.records[0], text))
    except ValueError as error:
        near = did_you_mean(text, names)
        raise UsageError(f"no column {text!r}", hint=near or hint) from error
    if kind not in kinds:
        raise UsageError(f"the column {text!r} has no {' or '.join(kinds)}", hint=hint)
    return text


def _likely_reward(raw: RawData | None, prompt: str | None, answer: str | None) -> str | None:
    """Return the kind of reward that fits the answers."""
    from rlctl.data_prep.jsonl import Fields
    from rlctl.data_prep.raw_data import answers_of, is_number

    if raw is None or prompt is None or answer is None:
        return None
    answers = answers_of(raw, Fields(prompt, answer, raw.name, None, None))
    if all(map(is_number, answers)):
        return "number"
    return "math" if any("\\" in each for each in answers) else "exact"


def _reward(text: str) -> str:
    """Return a known kind of reward whose package is installed."""
    from importlib.util import find_spec

    from rlctl.errors import MissingExtraError, UsageError
    from rlctl.runtime.rewards.stubs import KINDS

    if text not in KINDS:
        raise UsageError(f"no kind of reward {text!r}", hint=f"kinds: {', '.join(KINDS)}")
    if text == "math" and find_spec("math_verify") is None:
        raise MissingExtraError(
            "rewards for mathematics need the package 'math_verify'",
            hint="pip install 'rlctl[math]'",
        )
    return text


def _num_gpus() -> int:
    from rlctl.runtime.planning.machine import visible_gpus

    return len(visible_gpus())


def _model(text: str) -> str:
    """Return a model whose tokenizer can be loaded. Raises ConfigError for another one."""
    _tokenizer(text)
    return text


@cache
def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    from rlctl.cli.startup import announce

    announce(f"reading the tokenizer of {model}")
    from rlctl.runtime.data.tokenizer import load_tokenizer

    return load_tokenizer(model)


def _count(text: str) -> int:
    from rlctl.errors import UsageError

    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"{text!r} is no number of devices", hint="1 or more")
    return int(text)

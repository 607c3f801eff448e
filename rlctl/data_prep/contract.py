"""Checks of the data contract: columns of a file and fields of a row."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlctl.data_prep.message_parts import IMAGE_KEY, shortened, text_of
from rlctl.errors import ConfigError, Problem

CONTRACT_HINT = (
    "`rlctl prep jsonl` converts your data; `rlctl data show FILE` shows the rows of a file"
)
TRUTH_PATH = "reward_model.ground_truth"
REWARD_SPEC = "reward_spec"  # name of `reward_model` in rows of SkyRL
CHATS = ("messages", "conversations", "conversation", "chat")  # columns of whole conversations
# Problems of one file that are listed in full; the others are counted.
MAX_PROBLEMS = 10
_MAX_ALIKE = 3  # places that are listed for one message

_QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query")
_ANSWERS = ("answer", "ground_truth", "solution", "response", "output", "target", "label")


def contract_hint(path: Path, columns: Iterable[str]) -> str:
    """Return a hint for a file with other columns: the command that converts it, if it can."""
    names = {column.lower(): column for column in columns}
    if {"chosen", "rejected"} <= names.keys():
        return f"convert it: rlctl prep preferences {shlex.quote(str(path))} --out data/mine"
    command = f"convert it: rlctl prep jsonl {shlex.quote(str(path))} --prompt-key"
    prompt = next((names[name] for name in _QUESTIONS if name in names), None)
    answer = next((names[name] for name in _ANSWERS if name in names), None)
    chat = next((names[name] for name in CHATS if name in names), None)
    if prompt is not None and answer is not None:
        return f"{command} {prompt} --answer-key {answer} --out data/mine"
    if chat is None:
        return CONTRACT_HINT
    return f"data.reader=chats (sft), or {command} {chat} --out data/mine"


def missing_columns(
    names: Sequence[str], path: Path, prompt_key: str, reward_fn_key: str
) -> list[Problem]:
    """Return a problem for each column that rows need and a parquet file with `names` lacks."""
    needed = {
        prompt_key.partition(".")[0]: "list<struct<role: string, content: string>>",
        reward_fn_key: "string",
        "reward_model": "struct<style: string, ground_truth: ...>",
    }
    if REWARD_SPEC in names:
        del needed["reward_model"]
    hint = contract_hint(path, names)
    listing = ", ".join(names)
    return [
        Problem(f"no column {name!r} ({kind}); columns: {listing}", f"{path}, column {name}", hint)
        for name, kind in needed.items()
        if name not in names
    ]


def prompt_of(record: dict[str, Any], prompt_key: str) -> Any:
    """Return the value at the dotted path `prompt_key`, or None; the JSON text of a chat as one."""
    value: Any = record
    for part in prompt_key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    from rlctl.data_prep.chat_records import chat_in

    return chat_in(value) or value


class Fault(NamedTuple):
    """Description of what is wrong with a row; rows with the same fault have one `reason`."""

    reason: str
    message: str
    hint: str | None = None


def row_faults(
    record: Any, prompt_key: str, reward_fn_key: str, image_key: str = IMAGE_KEY
) -> list[Fault]:
    """Return descriptions of what is wrong with one row; empty if it is valid."""
    if isinstance(record, dict):
        return list(_faults(record, prompt_key, reward_fn_key, image_key))
    message = (
        f"the row is {type(record).__name__}, "
        f"expected an object with {prompt_key}, {reward_fn_key} and reward_model"
    )
    return [Fault("the row is not an object", message)]


def is_blank(record: dict[str, Any], prompt_key: str) -> bool:
    """Return True if no message of a valid row has text."""
    chat = prompt_of(record, prompt_key)
    texts = [chat] if isinstance(chat, str) else [text_of(turn["content"]) for turn in chat]
    return not any(text.strip() for text in texts)


def _faults(
    record: dict[str, Any], prompt_key: str, reward_fn_key: str, image_key: str
) -> Iterator[Fault]:
    source = record.get(reward_fn_key)
    if not isinstance(source, str) or not source:
        message = f"column {reward_fn_key!r} is {source!r}, expected a non-empty text"
        yield Fault(_reason(reward_fn_key, source), message)
    chat = prompt_of(record, prompt_key)
    messages = chat
    if isinstance(chat, str):
        messages = [{"role": "user", "content": chat}]
    if not isinstance(messages, list) or not chat:
        yield Fault(
            _reason(prompt_key, chat),
            f"column {prompt_key!r} is {shortened(chat)}, "
            "expected a non-empty list of {role, content}",
        )
        messages = []
    texts: list[Any] = []
    for position, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        role = fields.get("role")
        text = text_of(fields.get("content"))
        texts.append(text)
        if not (isinstance(role, str) and role and isinstance(text, str)):
            yield Fault(
                _reason(f"a message of {prompt_key}", text if fields else message),
                f"column {prompt_key!r}, message {position} is {shortened(message)}, "
                "expected {role, content}, both text",
            )
    if image_key in record:
        from rlctl.data_prep.images import image_faults

        for fault in image_faults(record[image_key], image_key, texts):
            yield Fault(f"{image_key} does not fit the prompt", fault)
    reward = record.get("reward_model")
    name = "reward_model"
    truth = reward
    if isinstance(reward, dict):
        name = TRUTH_PATH
        truth = reward.get("ground_truth")
    if not isinstance(reward, dict) or truth is None:
        yield Fault(
            _reason(name, truth),
            f"column 'reward_model' is {shortened(reward)}, "
            "expected {style, ground_truth} with a ground_truth that is not null",
        )
    if not isinstance(record.get("extra_info"), dict | None):
        yield Fault(
            _reason("extra_info", record["extra_info"]),
            f"column 'extra_info' is {shortened(record['extra_info'])}, expected an object or its "
            "JSON text",
        )


def _reason(name: str, value: Any) -> str:
    if value is None:
        return f"{name} is null"
    if value or value == 0:
        return f"{name} has the wrong type"
    return f"{name} is empty"


def raise_capped(problems: list[Problem], path: Path) -> None:
    """Raise one ConfigError with the first problems of a file and a count of the others, if any.

    A problem that several records share is reported once, at the first of them.
    """
    alike: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.message, problem.hint), []).append(problem)
    problems = [record for same in alike.values() for record in _joined(same)]
    hidden = len(problems) - MAX_PROBLEMS
    if hidden > 0:
        problems = [
            *problems[:MAX_PROBLEMS],
            Problem(f"and {hidden} more problems of this file", str(path)),
        ]
    if problems:
        raise ConfigError(*problems)


def _joined(same: list[Problem]) -> list[Problem]:
    """Return problems with one message, or one for all if they are many."""
    if len(same) <= _MAX_ALIKE:
        return same
    first = same[0]
    return [Problem(first.message, f"{first.where} and {len(same) - 1} more records", first.hint)]

"""Data set of preference pairs: two responses to a prompt, of which one was preferred.

A row is an ordinary prompt row with the texts `chosen` and `rejected` in `extra_info`, and
`margin` where the source has scores. Understood are TRL's formats (a prompt with two completions,
texts or messages, or two conversations with a common start), UltraFeedback's columns and the
transcripts of HH-RLHF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlctl.data_prep.arithmetic import NAME as ARITHMETIC
from rlctl.data_prep.arithmetic_pairs import arithmetic_pairs
from rlctl.data_prep.chat_records import FORMS, Chat, is_chat, read_chat
from rlctl.data_prep.datasets import Splits, dataset, option
from rlctl.data_prep.decoded_images import require_pillow
from rlctl.data_prep.message_parts import shortened, with_text
from rlctl.data_prep.question_records import split_source, with_images
from rlctl.data_prep.record_files import name_of, record_files
from rlctl.data_prep.records import convert, value_at
from rlctl.data_prep.rows import PromptRow, RowSource
from rlctl.data_prep.skipping import report_skipped
from rlctl.data_prep.text_files import TextParams
from rlctl.errors import ConfigError, Problem

_MARGIN_KEYS = ("margin", "score_chosen", "score_rejected")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")


class PreferencesParams(TextParams):
    """Options of `rlctl prep preferences`."""

    source: str = option(
        ...,
        "SOURCE",
        "A file (JSONL, JSON list or parquet), a data set of the hub (owner/name), or "
        "`arithmetic` for right and wrong solutions of the quickstart's problems.",
        json_schema_extra={"argument": True},
    )
    prompt_key: str = option(
        "prompt",
        "KEY",
        "Key of the prompt: a text or a list of {role, content}; without it, the "
        "prompt is the common start of both conversations.",
    )
    chosen_key: str = option(
        "chosen", "KEY", "Key of the preferred response: a text, messages, or a conversation."
    )
    rejected_key: str = option("rejected", "KEY", "Key of the other response.")
    image_key: str | None = option(
        None, "KEY", "Key of the prompt's images, as of `rlctl prep jsonl`; needs Pillow."
    )
    data_source: str | None = option(
        None, "NAME", "Name of the data in metrics; by default that of the file or the data set."
    )
    split: str = option("train", "NAME", "Split of a data set of the hub.")
    skip_invalid: bool = Field(
        default=False,
        description="Leave out and count records that are not a pair, such as two equal responses.",
    )
    val_fraction: float = option(0.0, "P", "Share of the records that goes to val.parquet.")
    train: int = option(4096, "N", "Training pairs of `arithmetic`.", ge=1)
    val: int = option(256, "M", "Validation pairs of `arithmetic`.", ge=1)
    seed: int = Field(default=0, description="The same seed makes the same files.")


@dataset(
    PreferencesParams,
    "rlctl prep preferences pairs.jsonl --out data/pairs --val-fraction 0.05",
    train=lambda params: "dpo --recipe dpo" if params.source == ARITHMETIC else None,
)
def preferences(params: PreferencesParams) -> Mapping[str, RowSource]:
    """Preference pairs, for `rlctl train rm` and `rlctl train dpo`: train.parquet, val.parquet.

    A record has a prompt and two responses, `chosen` and `rejected`: texts, messages, or two
    conversations with a common start (TRL, UltraFeedback, HH-RLHF). Scores in `score_chosen` and
    `score_rejected`, or a number in `margin`, become the pair's margin.
    """
    if params.source == ARITHMETIC:
        return arithmetic_pairs(params.train, params.val, params.seed)
    if params.image_key is not None:
        require_pillow("--image-key")
    files = record_files([params.source], params.split)
    source = params.data_source or name_of([params.source])
    skipped: list[Problem] | None = [] if params.skip_invalid else None

    def row_of(record: Any, index: int, path: Path) -> PromptRow:
        prompt, chosen, rejected = pair_of(record, params)
        extra_info = {"index": index, "chosen": chosen, "rejected": rejected}
        if (margin := _margin(record)) is not None:
            extra_info["margin"] = margin
        row = PromptRow(source, prompt, "", style="model", extra_info=extra_info)
        return with_images(row, params.image_key, record, path.parent)

    hint = "--skip-invalid leaves such records out"
    rows = list(convert(files, row_of, hint, skipped, params.form()))
    report_skipped(skipped or (), len(rows) + len(skipped or ()))
    if not rows:
        raise ConfigError("no pairs are left", where=params.source)
    splits = split_source(lambda: iter(rows), params.val_fraction, params.seed, len(rows))
    return Splits(splits, len(skipped or ()))


def pair_of(record: Any, params: PreferencesParams) -> tuple[Chat, str, str]:
    """Return the prompt and the texts of both responses. Raises ValueError for anything else."""
    if params.image_key is not None:  # content parts refer to images, too
        keys = params.prompt_key, params.chosen_key, params.rejected_key
        record |= {
            key: list(map(with_text, record[key])) for key in keys if is_chat(record.get(key))
        }
    chosen, rejected = (
        _conversation(value_at(record, key), key)
        for key in (params.chosen_key, params.rejected_key)
    )
    start = _common_start(chosen, rejected)
    ends = (*chosen[len(start) :], *rejected[len(start) :])
    if len(ends) != 2 or {end["role"] for end in ends} != {"assistant"}:
        raise ValueError("the conversations differ in more than the assistant's last message")
    if ends[0] == ends[1]:
        raise ValueError("both responses are the same")
    prompt: list[Any] = []
    if params.prompt_key in record:
        prompt = _conversation(record[params.prompt_key], params.prompt_key, role="user")
    if start[: len(prompt)] != prompt and start[-len(prompt) :] != prompt:
        start = prompt + start
    if not start and not prompt:
        keys = ", ".join(map(str, record))
        raise ValueError(f"no prompt: no key {params.prompt_key!r}, and no common start ({keys})")
    return start or prompt, ends[0]["content"], ends[1]["content"]


def _conversation(value: Any, key: str, role: str = "assistant") -> Chat:
    """Return messages; a text is a transcript of HH-RLHF, or one message of `role`."""
    if isinstance(value, str) and value.strip():
        first, *parts = _SPEAKER.split(value)
        if not parts or first.strip():
            return [{"role": role, "content": value}]
        chat = [
            {"role": _SPEAKERS[speaker], "content": text.strip()}
            for speaker, text in zip(parts[::2], parts[1::2], strict=True)
        ]
        if not chat[-1]["content"]:  # a prompt ends with "Assistant:"
            chat.pop()
        return chat
    if is_chat(value):
        return read_chat(value, key)
    raise ValueError(f"{key!r} is {shortened(value)}, expected a non-empty text or {FORMS}")


def _common_start(chosen: Chat, rejected: Chat) -> Chat:
    """Return the messages that both conversations start with, without the last of either."""
    count = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        count += 1
    return chosen[:count]


def _margin(record: dict[str, Any]) -> float | None:
    """Return by how much the chosen response is better, where the record has a number."""
    margin, chosen, rejected = (record.get(key) for key in _MARGIN_KEYS)
    if isinstance(margin, int | float):
        return float(margin)
    if isinstance(chosen, int | float) and isinstance(rejected, int | float):
        return float(chosen) - float(rejected)
    return None

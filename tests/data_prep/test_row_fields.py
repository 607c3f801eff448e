"""Texts and numbers that an algorithm reads from rows."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.data_prep.contract import Fault
from rlctl.data_prep.row_fields import RowField, read_field, read_text
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError

QUESTION = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "4"}
FIELD = RowField("extra_info.answer", "data.response_key")


def row(answer: Any, *prompt: dict[str, str]) -> PromptRow:
    return PromptRow("s", list(prompt or (QUESTION,)), "4", extra_info={"answer": answer})


@pytest.mark.parametrize(
    "value",
    [
        "4",
        4,
        [ANSWER],
        [QUESTION, ANSWER],
        [{"from": "gpt", "value": "4"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}],
        '[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]',
    ],
)
def test_a_text_or_a_chat_that_ends_with_it_is_read(value: Any) -> None:
    assert read_text(row(value), FIELD) == "4"


def test_a_chat_may_repeat_the_end_of_the_prompt() -> None:
    assert read_text(row([QUESTION, ANSWER], SYSTEM, QUESTION), FIELD) == "4"
    assert read_text(row([SYSTEM, QUESTION, ANSWER], SYSTEM, QUESTION), FIELD) == "4"


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "is null", "'extra_info.answer' is null (data.response_key)"),
        ("", "is empty", "is empty"),
        (" \n", "is empty", "is empty"),
        ([{"role": "assistant", "content": ""}], "is empty", "is empty"),
        (4.0, "has the wrong type", "is 4.0, expected a text"),
        (True, "has the wrong type", "is True, expected a text"),
        (["4"], "has the wrong type", "is ['4'], expected a text"),
        ({"text": "4"}, "has the wrong type", "expected a text"),
        ([{"role": "assistant", "content": None}], "has the wrong type", "'content' None"),
        ([QUESTION], "does not end with the assistant", "a message of 'user'"),
        ([SYSTEM, ANSWER], "does not follow the prompt", "are not those of the row's prompt"),
    ],
)
def test_other_values_are_faults(value: Any, reason: str, message: str) -> None:
    found = read_field(row(value), FIELD)
    assert isinstance(found, Fault)
    assert found.reason == f"extra_info.answer {reason}"
    assert message in found.message
    with pytest.raises(ConfigError, match="a row of 's'"):
        read_text(row(value), FIELD)


def test_a_missing_field_names_those_that_exist() -> None:
    found = read_field(row("4"), RowField("extra_info.other", "data.chosen_key"))
    assert found == Fault(
        "extra_info.other is missing",
        "the row has no field 'extra_info.other' (data.chosen_key)",
        "extra_info has: answer",
    )


def test_a_number_is_no_text() -> None:
    margin = RowField("extra_info.answer", "algorithm.params.margin", is_number=True)
    assert read_field(row(0.5), margin) == 0.5
    assert isinstance(read_field(row("0.5"), margin), Fault)
    assert isinstance(read_field(row(True), margin), Fault)

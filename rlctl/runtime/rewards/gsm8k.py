"""The GSM8K scorer: 1 for the right final number, 0 for anything else.

Two methods compare numbers (`18` = `18.0` = `18.` = `$18` = `\\boxed{18}`, `1,000` = `1000`):
    strict    the line after the last `####`, which holds one number, perhaps with a unit
    flexible  the last number anywhere in the response
Two methods reproduce verl's scorer, which compares strings in the last 300 characters, so that
"#### 18." is wrong:
    verl_strict, verl_flexible
docs/semantics.md has the rule of `strict` with examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

from pydantic import Field

from rlctl.plugins import Params, declare
from rlctl.runtime.rewards.functions import in_process

_MARK = "####"
_PLAIN = re.compile(r"-?\d{1,18}", re.ASCII)
_MAX_MARKS = 20  # that are tried, from the last
# The extracted answer, and True if it is right.
Found = tuple[str | None, bool]


def read_number(text: str) -> Decimal | None:
    """Return the value of a text that is one number and nothing else, else None."""
    if _PLAIN.fullmatch(text):
        return Decimal(text)
    from rlctl.runtime.rewards import gsm8k_notation

    return gsm8k_notation.read_number(text)


def _value(truth: str) -> Decimal:
    value = read_number(truth)
    if value is None:
        raise ValueError(f"the ground truth {truth!r} is not a number")
    return value


def compare(found: Decimal | None, truth: str) -> Found:
    """Return the plain form of the number, equal for equal numbers, and the comparison."""
    wanted = _value(truth)
    if found is None:
        return None, False
    plain = f"{found:f}"
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return plain, found == wanted


def without_thoughts(solution: str) -> str:
    """Return the response after its last `</think>`, without a thought that has no end."""
    return solution.rpartition("</think>")[2].partition("<think>")[0]


def _marked_line(solution: str) -> str | None:
    """Return the text after the last `####` that marks an answer.

    A mark that ends a line with an earlier mark only closes it, and one amid a sentence without
    digits only mentions the mark.
    """
    end = len(solution)
    for _ in range(_MAX_MARKS):
        start = solution.rfind(_MARK, 0, end)
        if start < 0:
            return None
        before = solution[:start].rstrip("#").rpartition("\n")[2]
        line, _, below = solution[start + len(_MARK) : end].partition("\n")
        is_closing = not line.strip() and _MARK in before
        is_mention = before.strip("*_`>#[ ") and not any(map(str.isdigit, line))
        if not is_closing and not (is_mention and line.strip()):
            return line if line.strip() else below.lstrip().partition("\n")[0]
        end = start
    return None


def _strict(solution: str, truth: str) -> Found:
    line = _marked_line(without_thoughts(solution))
    if line is None:
        return compare(None, truth)
    return compare(read_number(line.strip()), truth)


def _other(name: str) -> Callable[[str, str], Found]:
    """Return a method of `gsm8k_methods`, which is imported at the first call."""

    def method(solution: str, truth: str) -> Found:
        from rlctl.runtime.rewards import gsm8k_methods

        return getattr(gsm8k_methods, name)(solution, truth)

    return method


class Gsm8kParams(Params):
    """Method of comparing a response with the ground truth."""

    method: Literal["strict", "flexible", "verl_strict", "verl_flexible"] = Field(
        default="strict",
        description="strict = one number, perhaps with a unit, after the last `####`, "
        "flexible = the last number; verl_* compare strings as verl does",
    )


# The last one is the quickstart's, in the same format.
DATA_SOURCES = ("openai/gsm8k", "gsm8k", "rlctl/arithmetic")
METHODS: dict[str, Callable[[str, str], Found]] = {
    "strict": _strict,
    **{name: _other(name) for name in ("flexible", "verl_strict", "verl_flexible")},
}


@declare(Params=Gsm8kParams, data_sources=DATA_SOURCES)
@in_process
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str,
) -> dict[str, Any]:
    """Return the score, 1.0 if the final number is `ground_truth`, else 0.0, and the number.

    `method` is a key of `METHODS`. Raises ValueError for an unknown method and, if numbers are
    compared, for a ground truth that is not a number.
    """
    del data_source, extra_info
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    pred, is_right = METHODS[method](solution_str, str(ground_truth))
    return {"score": float(is_right), "pred": pred}

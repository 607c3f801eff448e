"""The GSM8K scorer: 1 for the right final number, 0 for anything else.

Two methods compare numbers (`18` = `18.0` = `18.` = `$18` = `\\boxed{18}`, `1,000` = `1000`):
    strict    the last `#### <number>` of the response
    flexible  the last number anywhere in the response
Two methods reproduce verl's scorer, which compares strings in the last 300 characters, so that
"#### 18." is wrong:
    verl_strict, verl_flexible
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import Field

from rlctl.plugins import Params, declare
from rlctl.runtime.rewards.functions import in_process

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus belongs to the number unless it follows an operand.
_SIGNED_NUMBER = re.compile(rf"(?:(?<![\w.)\]])-)?\$?(?:{_NUMBER})", re.ASCII)
_DIGITS = "0123456789"
_BEFORE_DIGITS = 4  # characters that determine a number's sign: one before it, "-", "$", "."
# Between mark and number: spaces, emphasis, a currency, a LaTeX box or math delimiters.
_MARKED_NUMBER = re.compile(
    rf"####(?:\s|\*|\$|\\\(|\\\$|\\boxed\{{)*(-?\$?(?:{_NUMBER}))", re.ASCII
)

_VERL_WINDOW = 300  # characters
_VERL_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_VERL_ANY = re.compile(r"(\-?[0-9\.\,]+)")


def _value(text: str) -> Decimal:
    try:
        return Decimal(re.sub(r"[\s,$]", "", text))
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None


def _strict(solution: str, truth: str) -> bool:
    found = _MARKED_NUMBER.findall(solution)
    return bool(found) and _value(found[-1]) == _value(truth)


def _flexible(solution: str, truth: str) -> bool:
    # From the end: a response is long, and only its last number counts.
    end = max(map(solution.rfind, _DIGITS)) + 1
    if not end:
        return False
    start = len(solution[:end].rstrip(_DIGITS + ".,"))
    found = _SIGNED_NUMBER.findall(solution[max(0, start - _BEFORE_DIGITS) : end])
    return _value(found[-1]) == _value(truth)


def _verl_strict(solution: str, truth: str) -> bool:
    found = _VERL_MARKED.findall(solution[-_VERL_WINDOW:])
    return bool(found) and found[-1].replace(",", "").replace("$", "") == truth


def _verl_flexible(solution: str, truth: str) -> bool:
    found = [each for each in _VERL_ANY.findall(solution[-_VERL_WINDOW:]) if each not in ("", ".")]
    return bool(found) and found[-1] == truth


class Gsm8kParams(Params):
    """Method of comparing a response with the ground truth."""

    method: Literal["strict", "flexible", "verl_strict", "verl_flexible"] = Field(
        default="strict",
        description="strict = the last `#### number`, flexible = the last number; "
        "verl_* compare strings as verl does",
    )


METHODS: dict[str, Callable[[str, str], bool]] = {
    "strict": _strict,
    "flexible": _flexible,
    "verl_strict": _verl_strict,
    "verl_flexible": _verl_flexible,
}


@declare(Params=Gsm8kParams)
@in_process
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str,
) -> float:
    """Return 1.0 if the final number of the response is `ground_truth`, else 0.0.

    `method` is a key of `METHODS`. Raises ValueError for an unknown method and, if numbers are
    compared, for a ground truth that is not a number.
    """
    del data_source, extra_info
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    return float(METHODS[method](solution_str, str(ground_truth)))

"""The GSM8K scorer: 1 for the right final number, 0 for anything else.

Two methods compare numbers (`18` = `18.0` = `18.` = `$18` = `\\boxed{18}`, `1,000` = `1000`):
    strict    the line after the last `####`, which holds one number and nothing else
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

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_MINUS, _CURRENCY = "-\N{MINUS SIGN}", "$€£¥"
# A minus belongs to the number unless it follows an operand.
_SIGNED_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])[{_MINUS}])?(?:\\?[{_CURRENCY}])?(?:{_NUMBER})", re.ASCII
)
_DIGITS = "0123456789"
_BEFORE_DIGITS = 5  # characters that determine a number's sign: one before it, "-", "\\$", "."

_MARK = "####"
_WHOLE_NUMBER = re.compile(
    rf"([{_MINUS}+])?(?:\\?[{_CURRENCY}])?({_NUMBER}|\d+\.)\s?(?:\\?%)?\.?", re.ASCII
)
# Notation around a number: emphasis, and a LaTeX box, text or math delimiters.
_WRAPPINGS = (
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_"), ("`", "`")),
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
    *((f"\\{name}{{", "}") for name in ("boxed", "fbox", "text", "textbf", "mathrm", "mathbf")),
)
_MAX_ANSWER = 1000  # characters of a line that can be a number: GSM8K's have at most twelve

_VERL_WINDOW = 300  # characters
_VERL_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_VERL_ANY = re.compile(r"(\-?[0-9\.\,]+)")

# The extracted answer, and True if it is right.
Found = tuple[str | None, bool]


def _number(text: str) -> Decimal | None:
    """Return the value of a text that is one number and nothing else, else None."""
    text = text.strip()
    if len(text) > _MAX_ANSWER:
        return None
    match = _WHOLE_NUMBER.fullmatch(text)
    if match:
        value = Decimal(match[2].replace(",", ""))
        return value if match[1] in (None, "+") else -value
    for opening, closing in _WRAPPINGS:
        inner = text.removesuffix(".").removeprefix(opening).removesuffix(closing)
        if len(inner) == len(text.removesuffix(".")) - len(opening) - len(closing):
            return _number(inner)
    return None


def _value(truth: str) -> Decimal:
    value = _number(truth)
    if value is None:
        raise ValueError(f"the ground truth {truth!r} is not a number")
    return value


def _compare(found: Decimal | None, truth: str) -> Found:
    """Return the plain form of the number, equal for equal numbers, and the comparison."""
    wanted = _value(truth)
    if found is None:
        return None, False
    plain = f"{found:f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain, found == wanted


def _strict(solution: str, truth: str) -> Found:
    _, mark, rest = solution.rpartition(_MARK)
    line = rest.lstrip().partition("\n")[0]
    # Emphasis that began before the mark: **#### 18**
    line = line.rstrip().removesuffix("**") if line.count("**") == 1 else line
    return _compare(_number(line) if mark else None, truth)


def _flexible(solution: str, truth: str) -> Found:
    # From the end: a response is long, and only its last number counts.
    end = max(map(solution.rfind, _DIGITS)) + 1
    if not end:
        return _compare(None, truth)
    start = len(solution[:end].rstrip(_DIGITS + ".,"))
    last = _SIGNED_NUMBER.findall(solution[max(0, start - _BEFORE_DIGITS) : end])[-1]
    return _compare(_number(last), truth)


def _verl_strict(solution: str, truth: str) -> Found:
    found = _VERL_MARKED.findall(solution[-_VERL_WINDOW:])
    last = found[-1].replace(",", "").replace("$", "") if found else None
    return last, last == truth


def _verl_flexible(solution: str, truth: str) -> Found:
    found = [
        number for number in _VERL_ANY.findall(solution[-_VERL_WINDOW:]) if number not in ("", ".")
    ]
    last = found[-1] if found else None
    return last, last == truth


class Gsm8kParams(Params):
    """Method of comparing a response with the ground truth."""

    method: Literal["strict", "flexible", "verl_strict", "verl_flexible"] = Field(
        default="strict",
        description="strict = one number and nothing else after the last `####`, flexible = the "
        "last number; verl_* compare strings as verl does",
    )


# The last one is the quickstart's, in the same format.
DATA_SOURCES = ("openai/gsm8k", "gsm8k", "rlctl/arithmetic")
METHODS: dict[str, Callable[[str, str], Found]] = {
    "strict": _strict,
    "flexible": _flexible,
    "verl_strict": _verl_strict,
    "verl_flexible": _verl_flexible,
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

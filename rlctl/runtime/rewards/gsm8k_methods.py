"""Methods of the GSM8K scorer that are not its default; see `gsm8k`."""

from __future__ import annotations

import re

from rlctl.runtime.rewards.gsm8k import Found, compare, read_number, without_thoughts
from rlctl.runtime.rewards.gsm8k_notation import NUMBER

_MINUS = "-\N{MINUS SIGN}"
_CURRENCY = "$€£¥"
# A minus belongs to the number unless it follows an operand.
_SIGNED_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])[{_MINUS}])?(?:\\?[{_CURRENCY}])?(?:{NUMBER})", re.ASCII
)
_DIGITS = "0123456789"
_BEFORE_DIGITS = 5  # characters that determine a number's sign: one before it, "-", "\\$", "."
_VERL_WINDOW = 300  # characters
_VERL_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_VERL_ANY = re.compile(r"(\-?[0-9\.\,]+)")


def flexible(solution: str, truth: str) -> Found:
    """Compare the last number of the response."""
    solution = without_thoughts(solution)
    # From the end: a response is long, and only its last number counts.
    end = max(map(solution.rfind, _DIGITS)) + 1
    if not end:
        return compare(None, truth)
    start = len(solution[:end].rstrip(_DIGITS + ".,"))
    last = _SIGNED_NUMBER.findall(solution[max(0, start - _BEFORE_DIGITS) : end])[-1]
    return compare(read_number(last), truth)


def verl_strict(solution: str, truth: str) -> Found:
    """Compare the digits after the last `####`, as verl does."""
    found = _VERL_MARKED.findall(solution[-_VERL_WINDOW:])
    last = found[-1].replace(",", "").replace("$", "") if found else None
    return last, last == truth


def verl_flexible(solution: str, truth: str) -> Found:
    """Compare the last digits, as verl does."""
    found = [
        number for number in _VERL_ANY.findall(solution[-_VERL_WINDOW:]) if number not in ("", ".")
    ]
    last = found[-1] if found else None
    return last, last == truth

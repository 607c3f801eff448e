"""Numbers with signs, currencies, units and notation around them, for the GSM8K scorer."""

from __future__ import annotations

import re
from decimal import Decimal

from rlctl.runtime.rewards.mathematics import units

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_DASHES = "-\N{MINUS SIGN}\N{EN DASH}"
_SIGNS = "$€£¥₹"
_THIN = r"(?:,|\{,\}|\\,|[ \u00a0\u2009\u202f])"  # between groups of digits
_WHOLE_NUMBER = re.compile(
    rf"(?P<sign>[{_DASHES}+]\s?)?(?:\\?[{_SIGNS}]\s?)?(?P<after>[{_DASHES}])?"
    rf"(?P<number>\d{{1,3}}(?:{_THIN}\d{{3}})+(?:\.\d+)?|{NUMBER}|\d+\.)"
    rf"\s?(?:\\?[%{_SIGNS}])?(?:\s+(?P<unit>[A-Za-z].*)|\s*\\text\{{(?P<text>[^{{}}]+)\}})?",
    re.ASCII,
)
_SEPARATORS = re.compile(r"[^\d.]")
_ENDS = ".,;!。，；！"  # one of them may follow the number
_TAGS = re.compile(r"(?:\s*<[/|]?[A-Za-z][\w|]*>)+\s*$")  # </answer>, <|im_end|>, </s>
# Before it: <answer>, `=`, `≈`, or the name of an unknown, as in `x = 18`.
_BEGINNING = re.compile(r"(?:<[A-Za-z]\w*>\s*)?(?:(?:[A-Za-z]\s*)?[=≈~]\s*)?", re.ASCII)
# Notation around a number: emphasis, and a LaTeX box, text or math delimiters.
_WRAPPINGS = (
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_"), ("`", "`"), ("(", ")")),
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
    *((f"\\{name}{{", "}") for name in ("boxed", "fbox", "text", "textbf", "mathrm", "mathbf")),
)
_MAX_ANSWER = 1000  # characters of a line that can be a number: GSM8K's have at most twelve


def read_number(text: str) -> Decimal | None:
    """Return the value of a text that is one number and nothing else, else None."""
    if len(text) > _MAX_ANSWER:
        return None
    text = _TAGS.sub("", text).strip()
    text = _BEGINNING.sub("", text, count=1)
    # Emphasis that began before the mark: **#### 18**
    if text.count("**") == 1:
        text = text.removesuffix("**")
    if text.endswith(tuple(_ENDS)):
        text = text[:-1].rstrip()
    match = _WHOLE_NUMBER.fullmatch(text)
    if match:
        return _with_unit(match)
    for opening, closing in _WRAPPINGS:
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(inner) == len(text) - len(opening) - len(closing):
            return read_number(inner)
    return None


def _with_unit(match: re.Match[str]) -> Decimal | None:
    """Return the number, None if words beside it change it: `18 or 19`, `18 is wrong`."""
    value = Decimal(_SEPARATORS.sub("", match["number"]))
    words = match["unit"] or match["text"]
    if words:
        scale = units.scale(words)
        if scale is None:
            return None
        value *= scale[0]
    if match["sign"] not in (None, "+"):
        value = -value
    if match["after"]:
        value = -value
    return value

"""Text of messages in which special tokens stay text.

A chat template puts messages and markup into one text, in which the tokenizer cannot tell them
apart. Before rendering, a noncharacter is placed in each special token of a message; the rendered
text is tokenized in the pieces between the noncharacters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Of Unicode: valid in strings, never in text. The first splits tokens, callers may use the second.
NONCHARACTERS = ("\ufdd0", "\ufdd1")
_SPLIT = NONCHARACTERS[0]
_SPLITS = re.compile(rf"{_SPLIT}|\\u{ord(_SPLIT):x}")  # a template may write it as JSON
_CLEAN = str.maketrans(dict.fromkeys(NONCHARACTERS, "\ufffd"))


def openings(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of the first character of each of `tokens` in a text, or None if empty.

    Overlapping tokens are all found. Blanks and tokens of one character cannot be split.
    """
    rests: dict[str, list[str]] = {}
    for token in sorted(set(tokens)):
        if len(token) > 1 and not token.isspace():
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
    parts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(parts)) if parts else None


def plain(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Return `value` with all its texts split inside each token whose opening `pattern` finds.

    Noncharacters and lone surrogates, which cannot be tokenized, are replaced.
    """
    if isinstance(value, str):
        text = value.encode(errors="replace").decode().translate(_CLEAN)
        if pattern is None:
            return text
        return pattern.sub(lambda found: found[0] + _SPLIT, text)
    if isinstance(value, Mapping):
        return {key: plain(item, pattern) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, pattern) for item in value]
    return value


def pieces(rendered: str) -> list[str]:
    """Return the texts between the splits of a rendered text, to be tokenized one by one."""
    return _SPLITS.split(rendered)

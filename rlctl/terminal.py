"""Escaping of text from models, data and files before it reaches a terminal."""

from __future__ import annotations

import re

# C0 without newline and tab, DEL and C1, bidirectional controls, line separators, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Return the text with control characters as escapes such as `\x1b`.

    A terminal would interpret them: move the cursor, hide text, change its title, reverse a line.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)

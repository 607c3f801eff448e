"""Limits of chat templates, which are programs of whoever made the model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 5.0
MOST_CHARACTERS = 1 << 24  # of a prompt, above the context of any model
_refused: dict[str, str] = {}  # by template: the reason; it is not tried again


class TemplateRefused(ValueError):
    """A template has not ended within a limit."""


def render_limited(tokenizer: Any, chat: list[dict[str, Any]], **kwargs: Any) -> str:
    """Render `chat` as text with the tokenizer's template.

    Raises TemplateRefused for one that takes longer than `LIMIT_S` or writes too much, and what
    the template raises.
    """
    template = str(tokenizer.chat_template)
    if template in _refused:
        raise TemplateRefused(_refused[template])
    try:
        with _limited():
            text = tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)
        if len(text) > MOST_CHARACTERS:
            raise TemplateRefused(f"it has written more than {MOST_CHARACTERS:,} characters")
    except TemplateRefused as error:
        _refused[template] = str(error)
        raise
    return text


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TemplateRefused in the block after `LIMIT_S`.

    No-op outside the main thread, and where another timer runs, such as that of `--max-time`: the
    checks before the start have rendered the template.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise TemplateRefused(f"it has not ended within {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

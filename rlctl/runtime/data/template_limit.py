"""Limits of chat templates, which are programs of whoever made the model."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
MOST_CHARACTERS = 1 << 24  # of a prompt, above the context of any model
_MOST_BYTES = 1 << 29  # of memory, for the first prompt: later, other threads use more
_refused: dict[str, str | None] = {}  # by template: the reason, with which it is not tried again


class TemplateRefused(ValueError):
    """A template has not ended within a limit."""


def render_limited(tokenizer: Any, chat: list[dict[str, Any]], **kwargs: Any) -> str:
    """Render `chat` as text with the tokenizer's template.

    Raises TemplateRefused for one that takes longer than `LIMIT_S` or writes too much, and what
    the template raises.
    """
    template = str(tokenizer.chat_template)
    if reason := _refused.get(template):
        raise TemplateRefused(reason)
    try:
        memory = nullcontext() if template in _refused else _limited_memory()
        with _limited_time(), memory:
            text = tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)
            _refused[template] = None
        if len(text) > MOST_CHARACTERS:
            raise TemplateRefused(f"it has written more than {MOST_CHARACTERS:,} characters")
    except TemplateRefused as error:
        _refused[template] = str(error)
        raise
    return text


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Raise TemplateRefused in the block instead of allocating more than `_MOST_BYTES` (Linux)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    is_limited = False
    with suppress(OSError, ValueError):  # macOS has neither /proc nor this limit
        pages = int(Path("/proc/self/statm").read_bytes().split()[5])
        limit = pages * resource.getpagesize() + _MOST_BYTES
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            is_limited = True
    try:
        yield
    except MemoryError as error:
        raise TemplateRefused(f"it needs more than {_MOST_BYTES >> 20} MiB of memory") from error
    finally:
        if is_limited:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _limited_time() -> Iterator[None]:
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

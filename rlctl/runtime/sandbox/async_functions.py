"""Recognition of users' asynchronous functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, a partial of one, or an object called as one."""
    unwrapped = inspect.unwrap(function)
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(
        getattr(unwrapped, "__call__", None)  # noqa: B004 (its kind, not its existence)
    )

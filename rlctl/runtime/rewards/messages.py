"""Messages of a worker process: JSON, since unpickling would run code that users have written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlctl.runtime.rewards.functions import CallResult

MAX_MESSAGE = 2**20  # bytes


def encoded(message: Any) -> bytes:
    """Return a message; results that are too long become failures."""
    data = json.dumps(message).encode()
    if len(data) <= MAX_MESSAGE:
        return data
    number, results = message if isinstance(message, tuple) else (None, message)
    error = f"the result has {len(data)} bytes, and {MAX_MESSAGE} are allowed"
    failed = [CallResult(0.0, {}, error)] * len(results)
    return json.dumps(failed if number is None else (number, failed)).encode()


def decoded_results(message: Any, num_calls: int) -> list[CallResult]:
    """Return the results of one call. Raises ValueError or TypeError for another message."""
    if not isinstance(message, Sequence) or len(message) != num_calls:
        raise ValueError("not the results of the call")
    return [CallResult(*each) for each in message]

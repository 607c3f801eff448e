"""Numbers that JSON can have."""

from __future__ import annotations

import math
from typing import Any


def finite_number(value: float) -> float | int | None:
    """Convert a number (also of numpy or torch) to a Python int or float, None if not finite."""
    if not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    return float(value)


def finite(value: Any) -> Any:
    """Replace NaN and infinities in nested data by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return finite_number(value)
    return value

"""Reward for the form of a response: 1 if a regular expression matches it, else 0."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from rlctl.plugins import Params, declare


class PatternParams(Params):
    """The regular expression of a form."""

    pattern: re.Pattern[str] = Field(
        description="regular expression of Python that matches anywhere in a response with the "
        r"form, such as '\n#### -?\d+\s*$'"
    )


@declare(Params=PatternParams)
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: re.Pattern[str],
) -> float:
    """Return 1.0 if the response has the form, else 0.0.

    Runs in a reward process with a time limit: an expression may take very long.
    """
    del data_source, ground_truth, extra_info
    return float(pattern.search(solution_str) is not None)

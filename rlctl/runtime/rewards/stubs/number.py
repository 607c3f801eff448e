"""Reward of this project: 1 if the last number of the response is the right one.

`rlctl train` calls `compute_score` for every response. Change it as you like: `method="strict"`
wants the number after `####`, and a number may be close instead of equal. Try it on responses of
your own:

    rlctl reward test --data val.parquet --responses responses.txt --reward reward.py:compute_score
"""

from __future__ import annotations

from typing import Any

from rlctl.runtime.rewards import gsm8k


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score and the number that was found.

    `solution_str` is the response, `ground_truth` the row's answer, `extra_info` the row's other
    fields. Other numbers in the result become metrics.
    """
    return gsm8k.score(data_source, solution_str, ground_truth, extra_info, method="flexible")

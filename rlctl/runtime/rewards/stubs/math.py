"""Reward of this project: 1 if the final answer is mathematically equal to the right one.

The final answer is the last `\\boxed{...}` of the response, else its last expression; 1/2 equals
0.5. `rlctl train` calls `compute_score` for every response. Change it as you like, and try it on
responses of your own:

    rlctl reward test --data val.parquet --responses responses.txt --reward reward.py:compute_score
"""

from __future__ import annotations

from typing import Any

from rlctl.runtime.rewards import math_answers


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score and the answer that was found.

    `solution_str` is the response, `ground_truth` the row's answer, `extra_info` the row's other
    fields. Other numbers in the result become metrics.
    """
    return math_answers.score(data_source, solution_str, ground_truth, extra_info)

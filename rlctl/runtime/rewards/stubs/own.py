"""Reward of this project: a start to change.

`rlctl train` calls `compute_score` for every response. Now it gives 1 to a response that contains
the row's answer, and 0 to any other. Change the marked lines, and try them on responses of your
own:

    rlctl reward test --data val.parquet --responses responses.txt --reward reward.py:compute_score
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score of a response, and parts of it that become metrics.

    `solution_str` is the response, `ground_truth` the row's answer, `extra_info` the row's other
    fields. A plain number instead of the dict works, too; an exception scores 0 and is reported.
    """
    del data_source, extra_info
    # Change these lines: extract what matters from the response, and compare it.
    right = str(ground_truth).strip().casefold() in solution_str.casefold()
    short = len(solution_str) < 2000  # characters
    return {"score": float(right), "short": float(short)}

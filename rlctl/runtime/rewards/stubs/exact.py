"""Reward of this project: 1 if the response ends with the right text.

`rlctl train` calls `compute_score` for every response. Change it as you like, for example to give
0.5 for a part of the answer, and try it on responses of your own:

    rlctl reward test --data val.parquet --responses responses.txt --reward reward.py:compute_score
"""

from __future__ import annotations

from typing import Any

MARK = "Answer:"  # the text after the last one counts; without it, the whole response


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score and the text that was compared.

    `solution_str` is the response, `ground_truth` the row's answer, `extra_info` the row's other
    fields. Other numbers in the result become metrics.
    """
    del data_source, extra_info
    found = solution_str.rpartition(MARK)[2]
    return {"score": float(_plain(found) == _plain(str(ground_truth))), "pred": found.strip()}


def _plain(text: str) -> str:
    """Return a text without what does not matter: case, white space and a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".")

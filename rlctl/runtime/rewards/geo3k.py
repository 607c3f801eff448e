"""Scorer of Geometry3K: 0.9 for the right answer in \\boxed{} and 0.1 for verl's format."""

from __future__ import annotations

from typing import Any

from rlctl.plugins import declare
from rlctl.runtime.rewards import math_answers

_FORMAT_WEIGHT = 0.1


@declare(data_sources=("hiyouga/geometry3k",), prepare=math_answers.prepare)
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score, its parts `acc` and `format` (0.0 or 1.0), and the answer.

    The scorer `math` compares the answers. Raises ValueError for a ground truth without expression.
    """
    acc = 0.0
    pred = None
    if "\\boxed" in solution_str:
        found = math_answers.score(data_source, solution_str, ground_truth, extra_info)
        acc = found["score"]
        pred = found["pred"]
    has_format = float(_has_format(solution_str))
    total = (1 - _FORMAT_WEIGHT) * acc + _FORMAT_WEIGHT * has_format
    return {"score": total, "acc": acc, "format": has_format, "pred": pred}


def _has_format(text: str) -> bool:
    """Return True for `<think>…</think>…\\boxed{…}…`, which is found in linear time."""
    if not text.startswith("<think>"):
        return False
    _, closed, rest = text.partition("</think>")
    _, boxed, inside = rest.partition("\\boxed{")
    return bool(closed and boxed) and "}" in inside

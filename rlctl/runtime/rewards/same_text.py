"""Scorer of short answers: 1 if the response is the truth apart from case, spaces, final period."""

from __future__ import annotations

from typing import Any

from rlctl.plugins import declare
from rlctl.runtime.rewards.functions import in_process


@in_process
@declare(data_sources=("rlctl/shapes", "rlctl/sums"))
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score, 1.0 for the answer `ground_truth`, else 0.0, and the answer."""
    del data_source, extra_info
    answer = " ".join(solution_str.split())
    right = _plain(answer) == _plain(str(ground_truth))
    return {"score": float(right), "pred": answer}


def _plain(text: str) -> str:
    return text.lower().removesuffix(".")

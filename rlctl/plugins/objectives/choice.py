"""Reward for a letter of a choice: 1 if the response answers with the ground truth, else 0."""

from __future__ import annotations

import re
from typing import Any

from rlctl.plugins import declare
from rlctl.runtime.rewards.functions import in_process
from rlctl.runtime.rewards.gsm8k import without_thoughts

_ANSWER = re.compile(
    r"(?i:answer(?: is|:)?)[\s:*]*\(?([A-J])\b"
    r"|\\boxed\{\s*(?:\\text\{)?\(?([A-J])\b|^\W*([A-J])\W*$",
    re.MULTILINE,
)


@declare(data_sources=("Idavidrein/gpqa",))
@in_process
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score and the letter: of the last "answer is (X)", box, or line of a letter."""
    del data_source, extra_info
    found = [next(filter(None, each)) for each in _ANSWER.findall(without_thoughts(solution_str))]
    pred = found[-1] if found else None
    return {"score": float(pred == ground_truth), "pred": pred}

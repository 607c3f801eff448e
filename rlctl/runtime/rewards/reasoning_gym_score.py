"""Scorer of reasoning-gym's problems: the package's function for each of its data sets."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from typing import Any

from rlctl.data_prep.reasoning_gym_rows import require_package
from rlctl.plugins import declare


@declare(data_sources=("reasoning_gym/*",), prepare=require_package)
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score of the text between `<answer>` and `</answer>`, or of the whole response.

    `extra_info.entry` is the problem as JSON. Raises ValueError if it is missing.
    """
    del ground_truth
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    if not extra_info or "entry" not in extra_info:
        raise ValueError("the row has no extra_info.entry: `rlctl prep reasoning_gym` writes it")
    answer = extract_answer(solution_str) or solution_str.strip()
    rate = get_score_answer_fn(data_source.removeprefix("reasoning_gym/"))
    return {"score": float(rate(answer, json.loads(extra_info["entry"]))), "pred": answer}

"""The MATH scorer: 1 if the final answer is mathematically equal to the ground truth, else 0.

`rlctl.runtime.rewards.mathematics` finds, reads and compares the answers, exactly and in bounded
time. math-verify compares with truths that have integrals, sums or limits. Both are imported in
reward processes only: math-verify uses sympy, which may not end on such an expression.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from rlctl.errors import MissingExtraError
from rlctl.plugins import declare

# verl's names of data sets with answers in LaTeX, and their usual names on the hub.
DATA_SOURCES = (
    *("lighteval/MATH*", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    *("EleutherAI/hendrycks_math", "hendrycks/competition_math", "qwedsacf/competition_math"),
    *("math_dapo*", "math", "aime*", "*/aime*", "*/AIME*"),
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
    *("numina_cn_k12", "numina_olympiads", "AI-MO/NuminaMath*", "math-ai/*"),
)
# What the readers of `mathematics` leave to math-verify, where a truth has it.
_BEYOND = re.compile(r"\\(?:i*int|oint|sum|prod|lim|det|partial)(?![A-Za-z])")


def prepare() -> None:
    """Import math-verify. Raises MissingExtraError if it is not installed."""
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the scorer of math answers needs the package {error.name!r}",
            hint="pip install 'rlctl[math]'",
        ) from error
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns about timeouts


@declare(data_sources=DATA_SOURCES, prepare=prepare)
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the score, 1.0 if the final answer equals `ground_truth`, else 0.0, and the answer.

    The ground truth is an expression in LaTeX or plain text. Raises ValueError if it has none.
    """
    del data_source, extra_info
    from rlctl.runtime.rewards.mathematics import answers, comparison, final_answer

    if not isinstance(ground_truth, str | int | float) or ground_truth != ground_truth:
        raise ValueError(f"the ground truth {ground_truth!r} is no expression")
    truth = answers.read(str(ground_truth))
    if not truth.text:
        raise ValueError(f"the ground truth {ground_truth!r} is no expression")
    written = final_answer.final_answer(solution_str)
    if written is None:
        return {"score": 0.0, "pred": None}
    found = answers.read(written)
    is_right = comparison.same(truth, found)
    if not is_right and _BEYOND.search(truth.text):
        is_right = _is_proven(truth.text, written)
    return {"score": float(is_right), "pred": comparison.plain(found)}


def _is_proven(truth: str, answer: str) -> bool:
    """Return True if math-verify proves the equality, to 30 digits."""
    from math_verify import LatexExtractionConfig, parse, verify

    # The time limits of math-verify are off (0): their alarm would replace the alarm of the call.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    sides = [parse(f"\\boxed{{{side}}}", latex, parsing_timeout=0) for side in (truth, answer)]
    return verify(*sides, float_rounding=30, numeric_precision=50, timeout_seconds=0)

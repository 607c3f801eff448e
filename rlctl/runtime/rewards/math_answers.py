"""The MATH scorer: 1 if the final answer is mathematically equal to the ground truth, else 0.

math-verify extracts and compares the answers. It is imported in reward processes only: it uses
sympy, which may not end on a malformed expression.
"""

from __future__ import annotations

import logging
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
_MAX_SOLUTION = 10_000  # characters from the end that are searched


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
    from math_verify import LatexExtractionConfig, parse, verify

    # The time limits of math-verify are off (0): their alarm would replace the alarm of the call.
    latex = LatexExtractionConfig(boxed_match_priority=0)
    truth = parse(f"\\boxed{{{ground_truth}}}", [latex], parsing_timeout=0)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} is no expression")
    boxed = solution_str.rfind("\\boxed")  # the last one: earlier ones are intermediate results
    if boxed >= 0:
        found = parse(solution_str[boxed:], [latex], parsing_timeout=0)
    else:
        found = parse(solution_str[-_MAX_SOLUTION:], parsing_timeout=0)
    is_right = verify(truth, found, timeout_seconds=0)
    return {"score": float(is_right), "pred": _plain(found)}


def _plain(found: list[Any]) -> str | None:
    """Return the parsed answer as text, equal for equal answers, or None without an answer."""
    try:
        return str(found[0]) if found else None
    except ValueError:  # an integer with too many digits to convert
        return str(found[-1])

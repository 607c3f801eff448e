"""Tests of the GSM8K scorer: strict and flexible compare numbers, verl_* compare strings."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from rlctl.runtime.rewards.gsm8k import METHODS, score

# Text, truth, then the scores by strict, flexible, verl_strict and verl_flexible. The last two
# columns were computed with the scorer of verl 0.9.1.
CASES = [
    ("#### 18", "18", 1, 1, 1, 1),
    ("**#### 18**", "18", 1, 1, 1, 1),
    ("#### 18.", "18", 1, 1, 0, 0),
    ("####18", "18", 1, 1, 0, 1),
    ("#### 018", "18", 1, 1, 0, 0),
    ("#### 1,000", "1000", 1, 1, 1, 0),
    ("The answer is 18", "18", 0, 1, 0, 1),
    ("#### 18\n#### 19", "18", 0, 0, 0, 0),
    ("#### 18, good", "18", 0, 1, 1, 0),
    ("#### 18 apples and 5 pears", "18", 0, 0, 1, 0),
    ("#### 18\n" + "x" * 400, "18", 1, 1, 0, 0),
    ("#### +18", "18", 1, 1, 0, 1),
    ("#### (18)", "18", 1, 1, 0, 1),
    ("#### €18", "18", 1, 1, 0, 1),
    ("#### 5 - 23 = -18", "-18", 0, 1, 0, 1),
]
# Text, truth, then the scores by strict and flexible.
NUMBERS = [
    ("#### 18.0", "18", 1, 1),
    ("#### 18", "18.0", 1, 1),
    (r"#### \(18\)", "18", 1, 1),
    ("####\n18", "18", 1, 1),
    ("#### -5", "-5", 1, 1),
    ("#### 5", "-5", 0, 0),
    ("#### -$5", "-5", 1, 1),
    ("#### .5", "0.5", 1, 1),
    ("so 23-5 = 18 and 20-18", "18", 0, 1),  # a difference, not a negative number
    ("it is (-18)", "-18", 0, 1),
    ("1,2,3", "3", 0, 1),
    ("1,0000", "0", 0, 1),  # not a group of three: 1, then 0000
    ("18 #### none", "18", 0, 1),
    ("", "18", 0, 0),
    ("...,,,$$$---", "18", 0, 0),
    ("#### 18 %", "18", 1, 1),
    ("#### -€1,234.50", "-1234.5", 1, 1),
    ("#### 18\nThis is the answer to 2 questions", "18", 1, 0),
    ("#### 18 #### 19", "19", 1, 1),
    ("#### " + "9" * 400, "9" * 400, 1, 1),
    ("#### " + "9" * 400, "9" * 399 + "8", 0, 0),  # as floats both are infinite
]


def scored(text: str, truth: object, method: str) -> float:
    return score("openai/gsm8k", text, truth, method=method)["score"]


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible", "verl_strict", "verl_flexible"), CASES
)
def test_all_methods(
    text: str, truth: str, strict: int, flexible: int, verl_strict: int, verl_flexible: int
) -> None:
    expected = {
        "strict": strict,
        "flexible": flexible,
        "verl_strict": verl_strict,
        "verl_flexible": verl_flexible,
    }
    assert {method: scored(text, truth, method) for method in METHODS} == expected


@pytest.mark.parametrize(("text", "truth", "strict", "flexible"), NUMBERS)
def test_numbers_are_compared_as_numbers(text: str, truth: str, strict: int, flexible: int) -> None:
    assert scored(text, truth, "strict") == strict
    assert scored(text, truth, "flexible") == flexible


def test_flexible_finds_the_last_number_like_a_search_from_the_start() -> None:
    number = re.compile(
        r"((?<![A-Za-z0-9_.)\]])-)?\$?([0-9]{1,3}(,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?"
        r"|((?<![A-Za-z0-9_.)\]])-)?\$?\.[0-9]+"
    )
    rng = random.Random(0)
    for _ in range(5_000):
        text = "".join(rng.choices("01,.-$ )x", k=rng.randint(1, 14)))
        found = [match.group() for match in number.finditer(text)]
        truth = found[-1].replace(",", "").replace("$", "") if found else "1"
        assert scored(text, truth, "flexible") == float(bool(found)), text


@pytest.mark.parametrize("text", ["#### 18", "#### $18.00", r"#### \boxed{018}.", "####+18"])
def test_equal_numbers_are_one_extracted_answer(text: str) -> None:
    for method in ("strict", "flexible"):
        assert score("", text, "7", method=method) == {"score": 0.0, "pred": "18"}
    assert score("", "#### none", "7", method="strict")["pred"] is None
    assert score("", "#### 1,800", "7", method="verl_strict")["pred"] == "1800"


def test_the_table_in_the_documentation_is_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    rows = re.findall(r"^\| `(#### .+?)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(rows) > 15
    for line, numbers in rows:
        found = [score("", line, "7", method=method)["pred"] or "–" for method in METHODS]
        assert found == numbers.split(" | "), line


def test_a_ground_truth_may_be_a_number() -> None:
    assert scored("#### 18", 18, "strict") == 1.0
    assert scored("#### 18.5", 18.5, "flexible") == 1.0


def test_unknown_method_and_wrong_ground_truth_raise() -> None:
    with pytest.raises(ValueError, match="known: strict, flexible"):
        score("", "#### 18", "18", method="loose")
    with pytest.raises(ValueError, match="'eighteen' is not a number"):
        score("", "#### 18", "eighteen", method="strict")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1," * 50_000,
        "#### " * 20_000,
        "-$." * 30_000,
        "####" + " " * 100_000,
        "#" * 100_000,
    ],
)
def test_long_malformed_text_is_scored_in_linear_time(method: str, text: str) -> None:
    started = time.process_time()
    assert scored(text, "18", method) == 0.0
    assert time.process_time() - started < 5.0  # quadratic time is minutes

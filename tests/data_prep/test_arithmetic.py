"""Tests of the arithmetic word problems: correct, distinct, and determined by the seed."""

from __future__ import annotations

import re

import pytest

from rlctl.data_prep.arithmetic import LEVELS, generate, train_and_validation
from rlctl.errors import UsageError

EQUATION = re.compile(r"(\d+) ([+*-]) (\d+) = (\d+)")


def solve(question: str) -> int:
    """Solve a problem from its text, independently of the templates."""
    sentences = [s for s in re.split(r"(?<=[.?])\s", question) if s.endswith(".")]
    numbers = [int(n) for n in re.findall(r"\d+", sentences[0])]
    value = numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
    for sentence in sentences[1:]:
        (number,) = map(int, re.findall(r"\d+", sentence))
        if "times as many" in sentence:
            value *= number
        elif " more" in sentence:
            value += number
        else:
            assert re.search(r"sells|loses|gives|eats", sentence), sentence
            value -= number
    return value


@pytest.mark.parametrize("level", [1, 3, 4])
def test_solutions_are_correct(level: int) -> None:
    for row in generate(500, seed=3, level=level, careless=0.0, split="train"):
        question, answer = row.extra_info["question"], row.extra_info["answer"]
        assert row.prompt == [{"role": "user", "content": question}]
        assert solve(question) == int(row.ground_truth)
        assert answer.split("#### ")[1] == row.ground_truth
        equations = EQUATION.findall(answer)
        assert len(equations) in LEVELS[level].steps
        results = [
            {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
            for a, op, b, _ in equations
        ]
        assert results == [int(result) for *_, result in equations]
        assert [int(a) for a, *_ in equations[1:]] == results[
            :-1
        ]  # each step starts from the previous result
        assert all(
            1 <= int(n) <= LEVELS[level].largest for n in re.findall(r"\d+", question + answer)
        )


def test_careless_solutions_omit_one_equation_and_are_wrong() -> None:
    good = generate(800, seed=5, level=2, careless=0.0, split="train")
    all_careless = generate(800, seed=5, level=2, careless=1.0, split="train")
    some = generate(800, seed=5, level=2, careless=0.6, split="train")
    several_steps = cut = 0
    for right, wrong, maybe in zip(good, all_careless, some, strict=True):
        assert right.prompt == wrong.prompt == maybe.prompt
        assert right.ground_truth == wrong.ground_truth == maybe.ground_truth
        equations = right.extra_info["answer"].split(" ; ")[:-1]
        if len(equations) == 1:
            assert wrong.extra_info["answer"] == right.extra_info["answer"]
            continue
        value = equations[-2].split(" = ")[1]
        assert wrong.extra_info["answer"] == " ; ".join([*equations[:-1], f"#### {value}"])
        assert value != right.ground_truth
        several_steps += 1
        cut += maybe.extra_info["answer"] == wrong.extra_info["answer"]
    assert cut / several_steps == pytest.approx(
        0.6, abs=0.06
    )  # 2.5 standard deviations of about 600 draws


def test_training_and_validation_rows_are_disjoint_and_seeded() -> None:
    train, val = train_and_validation(3000, 500, seed=1, level=1, careless=0.5)
    questions = [row.extra_info["question"] for row in train + val]
    assert len(set(questions)) == 3500
    assert train == generate(3000, seed=1, level=1, careless=0.5, split="train")
    assert (
        train_and_validation(3000, 20, seed=1, level=1, careless=0.5)[0] == train
    )  # the size of one set does not change the other
    assert train != train_and_validation(3000, 500, seed=2, level=1, careless=0.5)[0]
    assert all(
        row.extra_info["answer"].endswith(f"#### {row.ground_truth}") for row in val
    )  # validation is never careless
    assert [row.extra_info["index"] for row in val] == list(range(500))
    assert {row.extra_info["split"] for row in val} == {"val"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": 5}, "level 5 does not exist"),
        ({"careless": 1.5}, "careless must be a probability"),
        ({"count": -1}, "cannot generate -1"),
    ],
)
def test_invalid_arguments_raise(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(**{"count": 3, "seed": 0, "level": 1, "careless": 0.0, "split": "train", **given})  # type: ignore[arg-type]

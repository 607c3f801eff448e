"""Countdown: an equation of given numbers that has a target; problems and reward."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from pydantic import Field

from rlctl.data_prep.datasets import option
from rlctl.errors import UsageError
from rlctl.plugins import Params, declare
from rlctl.runtime.rewards.functions import in_process

Problem = tuple[tuple[int, ...], int]

_PROMPT = (  # of TinyZero
    "Using the numbers {}, create an equation that equals {}. You can use basic arithmetic "
    "operations (+, -, *, /) and each number can only be used once. Show your work in <think> "
    "</think> tags. And return the final answer in <answer> </answer> tags, for example <answer> "
    "(1 + 2) / 3 </answer>."
)
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200  # characters of an equation that is read
_MAX_REPEATS = 2000


class CountdownParams(Params):
    """Options of `rlctl prep countdown`."""

    train: int = option(4096, "N", "Training problems.", ge=1)
    val: int = option(256, "M", "Validation problems; none of them is for training.", ge=1)
    numbers: int = option(4, "K", "Most numbers of a problem; it has 3 to K.", ge=3, le=6)
    largest: int = option(99, "L", "Largest number, and largest target.", ge=10)
    seed: int = Field(default=0, description="The same seed makes the same files.")


def draw(params: CountdownParams) -> list[Problem]:
    """Return train + val different problems that have a solution."""
    rng = random.Random(params.seed)
    found = dict[Problem, None]()
    repeats = 0
    while len(found) < params.train + params.val:
        numbers = tuple(
            rng.randint(1, params.largest) for _ in range(rng.randint(3, params.numbers))
        )
        values = [Fraction(number) for number in numbers]
        while len(values) > 1:
            one, two = (values.pop(rng.randrange(len(values))) for _ in range(2))
            usable = [*_OPERATORS.values()][: 4 if two else 3]
            values.append(rng.choice(usable)(one, two))
        problem = numbers, int(values[0])
        repeats += 1
        if problem not in found and values[0] in range(1, params.largest + 1):
            found[problem] = None
            repeats = 0
        if repeats > _MAX_REPEATS:
            raise UsageError(f"about {len(found)} problems exist", hint="a larger --largest")
    return list(found)


def prompt_of(numbers: tuple[int, ...], target: int) -> str:
    """Return the text of a problem."""
    return _PROMPT.format(list(numbers), target)


@declare(data_sources=("rlctl/countdown", "countdown"))
@in_process
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return 1.0 for an equation of all numbers, each once, with the target; else 0.0.

    The component `format` is 1.0 for a response with an answer that is an equation.
    """
    del data_source, extra_info
    answers = _ANSWER.findall(solution_str)
    equation = answers[-1].partition("=")[0].strip() if answers else ""
    found = _read(equation)
    numbers, value = found if found else ([], None)
    wanted = [int(number) for number in ground_truth["numbers"]]
    is_right = value == int(ground_truth["target"]) and sorted(numbers) == sorted(wanted)
    return {"score": float(is_right), "format": float(found is not None), "pred": equation or None}


def _read(equation: str) -> tuple[list[int], Fraction] | None:
    """Return the numbers of an equation and its value; None for anything else."""
    numbers: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(equation)

    if len(equation) > _LONGEST:
        return None
    try:
        return numbers, value(ast.parse(equation, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None

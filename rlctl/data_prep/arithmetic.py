"""Arithmetic word problems from templates, in GSM8K's format, for a tiny model on a CPU.

A problem starts with a number of items and changes it in one to three steps. Its solution has one
equation per step and ends with `#### N`:

    Tom has 12 apples. He buys 5 more. Then he gives 3 to a friend.
    How many apples does Tom have now?
    12 + 5 = 17 ; 17 - 3 = 14 ; #### 14

The vocabulary is small (about eighty words) and the prompt is only the question, because each
prompt token costs time in each step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pydantic import Field

from rlctl.data_prep.agent_columns import ToolsParams, with_tools
from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import UsageError

NAME = "arithmetic"  # of the data set, `rlctl prep NAME`
DATA_SOURCE = "rlctl/arithmetic"

PEOPLE = {
    **dict.fromkeys(("Tom", "Ben", "Leo", "Max", "Sam", "Jim"), ("he", "him")),
    **dict.fromkeys(("Ann", "Eva", "Mia", "Zoe", "Amy", "Sue"), ("she", "her")),
}
FOOD = ("apples", "plums", "eggs", "nuts", "cookies")
THINGS = ("pens", "books", "coins", "cards", "shells", "stamps")

START = (
    "{name} has {a} {items}",
    "{name} buys {a} {items}",
    "{name} finds {a} {items}",
    "{name} starts with {a} {items}",
)
START_PRODUCT = (
    "{name} has {b} boxes of {a} {items}",
    "{name} buys {b} bags with {a} {items} each",
    "{name} gets {a} {items} a day for {b} days",
)
ADD = (
    "{he} buys {b} more",
    "{he} finds {b} more",
    "{he} gets {b} more",
    "a friend gives {him} {b} more",
)
SUBTRACT = ("{he} sells {b}", "{he} loses {b}", "{he} gives {b} away", "{he} gives {b} to a friend")
SUBTRACT_FOOD = (*SUBTRACT, "{he} eats {b}")
MULTIPLY = (
    "soon {he} has {b} times as many",
    "after a week {he} has {b} times as many",
    "a year later {he} has {b} times as many",
)
ASK = (
    "How many {items} does {name} have now?",
    "How many {items} does {he} have in the end?",
    "How many {items} are there now?",
)

_RECIPES = ("grpo --recipe sums_smollm", "ppo --recipe ppo")  # of level 0, of others
# Consecutive draws of known questions after which the templates count as exhausted.
MAX_REPEATS = 2000


@dataclass(frozen=True)
class Level:
    """Difficulty of problems. No number of a problem or its solution exceeds `largest`."""

    steps: tuple[int, ...]  # drawn uniformly; a repeated entry is more likely
    largest_given: int  # limit of the numbers in the text
    largest_factor: int
    largest: int


LEVELS = {
    1: Level(steps=(1, 2), largest_given=15, largest_factor=3, largest=30),
    2: Level(steps=(1, 2, 2, 3), largest_given=50, largest_factor=5, largest=99),
    3: Level(steps=(2, 3, 3), largest_given=300, largest_factor=9, largest=999),
    4: Level(steps=(1, 2, 2), largest_given=999, largest_factor=19, largest=9999),
}


@dataclass(frozen=True)
class Problem:
    """Question, the equations of its solution, and the value after each equation."""

    question: str
    equations: tuple[str, ...]
    values: tuple[int, ...]

    def solution(self, stop_early: bool) -> str:
        """Return the solution text; `stop_early` omits the last of several equations.

        Then the reported result is the value before that equation.
        """
        num_equations = len(self.equations) - (stop_early and len(self.equations) > 1)
        return " ; ".join(
            (*self.equations[:num_equations], f"#### {self.values[num_equations - 1]}")
        )


class ArithmeticParams(ToolsParams):
    """Options of `rlctl prep arithmetic`."""

    train: int = option(4096, "N", "Training problems.", ge=1)
    val: int = option(256, "M", "Validation problems; none of them is for training.", ge=1)
    seed: int = Field(default=0, description="The same seed makes the same files.")
    level: int = Field(
        default=2,
        ge=0,
        le=4,
        description="0: the 400 sums to 20 + 20. 1: one or two steps, numbers to 30. "
        "2: one to three steps, to 99. 3: two or three steps, to 999. "
        "4: one or two steps, to 9,999, for a calculator.",
    )
    careless: float = option(
        0.0,
        "P",
        "With this probability a training solution of several steps stops one early "
        "and reports that value: for making a base model that has something to learn. The ground "
        "truth stays right.",
    )


@dataset(
    ArithmeticParams,
    "rlctl prep arithmetic --out data/arithmetic --train 4096 --val 256 --seed 1 --level 2",
    default_out="data/arithmetic",
    train=lambda params: None if params.tools else _RECIPES[params.level > 0],
)
def arithmetic(params: ArithmeticParams) -> dict[str, list[PromptRow]]:
    """Word problems from templates, with GSM8K's schema and scorer: train.parquet, val.parquet.

    The prompt is the bare question, without an instruction: on a CPU every token counts. The worked
    solution, such as "12 + 5 = 17 ; 17 - 3 = 14 ; #### 14", is in extra_info.answer.
    """
    names = params.tool_names()
    if not params.level:
        from rlctl.data_prep.sums import sums

        return sums(params.train, params.val, params.seed, names)
    train, val = train_and_validation(
        params.train, params.val, seed=params.seed, level=params.level, careless=params.careless
    )
    return {"train": with_tools(train, names), "val": with_tools(val, names)}


def generate(count: int, *, seed: int, level: int, careless: float, split: str) -> list[PromptRow]:
    """Generate `count` rows with different questions, determined by `seed` and `level`.

    With probability `careless` (0 to 1) the solution in `extra_info["answer"]` stops one equation
    early and reports that intermediate value, which is always wrong; `ground_truth` stays correct.
    Solutions with one equation stay correct. A model trained on such solutions has the steps but
    omits the last one, which reinforcement learning can correct.

    Raises UsageError for an unknown level, a `careless` outside [0, 1], or a `count` that exceeds
    the number of different problems.
    """
    return _rows(_problems(count, seed, level), seed, careless, split)


def train_and_validation(
    num_train: int, num_val: int, *, seed: int, level: int, careless: float
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Generate training and validation rows without common questions; see `generate`.

    Only training solutions are `careless`.
    """
    problems = _problems(num_train + num_val, seed, level)  # with different questions
    train = _rows(problems[:num_train], seed, careless, "train")
    return train, _rows(problems[num_train:], seed, 0.0, "val")


def _rows(problems: list[Problem], seed: int, careless: float, split: str) -> list[PromptRow]:
    if not 0 <= careless <= 1:
        raise UsageError(
            f"careless must be a probability, given {careless}", hint="use a number from 0 to 1"
        )
    coin = random.Random(f"careless-{seed}")  # another stream: the questions do not change
    rows = []
    for index, problem in enumerate(problems):
        answer = problem.solution(stop_early=coin.random() < careless)
        rows.append(
            PromptRow(
                data_source=DATA_SOURCE,
                prompt=[{"role": "user", "content": problem.question}],
                ground_truth=str(problem.values[-1]),
                ability="math",
                style="rule",
                extra_info={
                    "split": split,
                    "index": index,
                    "question": problem.question,
                    "answer": answer,
                },
            )
        )
    return rows


def _problems(count: int, seed: int, level: int) -> list[Problem]:
    if level not in LEVELS:
        raise UsageError(
            f"level {level} does not exist", hint=f"use one of {', '.join(map(str, LEVELS))}"
        )
    if count < 0:
        raise UsageError(f"cannot generate {count} problems", hint="use a number ≥ 0")
    unique: dict[str, Problem] = {}
    repeats = 0
    rng = random.Random(seed)
    while len(unique) < count:
        problem = _draw(rng, LEVELS[level])
        repeats += 1
        if problem.question not in unique:
            repeats = 0
        unique.setdefault(problem.question, problem)
        if repeats > MAX_REPEATS:
            raise UsageError(
                f"level {level} has about {len(unique)} different problems, requested {count}",
                hint="use a higher --level or fewer rows",
            )
    return list(unique.values())


def _draw(rng: random.Random, level: Level) -> Problem:
    name = rng.choice(list(PEOPLE))
    items = rng.choice(FOOD + THINGS)
    he, him = PEOPLE[name]
    words = {"name": name, "he": he, "him": him, "items": items}
    num_steps = rng.choice(level.steps)
    sentences: list[str] = []
    equations: list[str] = []
    values: list[int] = []
    value = rng.randint(2, level.largest_given)
    if rng.random() < 0.25:
        factor = rng.randint(2, level.largest_factor)
        value = rng.randint(2, level.largest // factor)
        sentences.append(rng.choice(START_PRODUCT).format(a=value, b=factor, **words))
        equations.append(f"{factor} * {value} = {factor * value}")
        value *= factor
        values.append(value)
    else:
        sentences.append(rng.choice(START).format(a=value, **words))
    while len(equations) < num_steps:
        template, operator, number = _step(rng, level, value, items)
        clause = template.format(b=number, **words)
        if operator != "*" and equations and rng.random() < 0.5:
            clause = "then " + clause
        sentences.append(clause)
        result = {"+": value + number, "-": value - number, "*": value * number}[operator]
        equations.append(f"{value} {operator} {number} = {result}")
        value = result
        values.append(value)
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
    return Problem(f"{text} {rng.choice(ASK).format(**words)}", tuple(equations), tuple(values))


def _step(rng: random.Random, level: Level, value: int, items: str) -> tuple[str, str, int]:
    """Draw a template, its operator and its number, so that the result is in 1..largest.

    Numbers are at least 2, because the templates use the plural.
    """
    limits = {
        "+": min(level.largest_given, level.largest - value),
        "-": min(level.largest_given, value - 1),
        "*": min(level.largest_factor, level.largest // value),
    }
    operator = rng.choice([operator for operator in "++--*" if limits[operator] >= 2])
    templates = {"+": ADD, "-": SUBTRACT_FOOD if items in FOOD else SUBTRACT, "*": MULTIPLY}[
        operator
    ]
    return rng.choice(templates), operator, rng.randint(2, limits[operator])

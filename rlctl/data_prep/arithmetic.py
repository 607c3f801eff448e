"""Word problems made from templates: GSM8K's shape and scoring, small enough for a model of a million parameters on a CPU.

A problem starts with a number of things and changes it in one to three steps; its solution is one equation a step and `#### N`:

    Tom has 12 apples. He buys 5 more. Then he gives 3 to a friend. How many apples does Tom have now?
    12 + 5 = 17 ; 17 - 3 = 14 ; #### 14

The words are few (some eighty) and the prompt is the bare question: every token of a prompt is paid for in every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError, UsageError

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

# How many draws in a row may repeat a question before the templates count as used up.
PATIENCE = 2000


@dataclass(frozen=True)
class Level:
    """How hard: `steps` is drawn from (what stands twice is twice as likely); no number of a problem or its solution exceeds `largest`."""

    steps: tuple[int, ...]
    largest_given: int  # of the numbers that the text gives
    largest_factor: int
    largest: int


LEVELS = {
    1: Level(steps=(1, 2), largest_given=15, largest_factor=3, largest=30),
    2: Level(steps=(1, 2, 2, 3), largest_given=50, largest_factor=5, largest=99),
    3: Level(steps=(2, 3, 3), largest_given=300, largest_factor=9, largest=999),
}


@dataclass(frozen=True)
class Problem:
    """A question, the equations that solve it, and the value after each."""

    question: str
    equations: tuple[str, ...]
    values: tuple[int, ...]

    def solution(self, stop_early: bool) -> str:
        """The worked solution; `stop_early` leaves out the last of two or more equations and reports the value before it."""
        num_equations = len(self.equations) - (stop_early and len(self.equations) > 1)
        return " ; ".join(
            (*self.equations[:num_equations], f"#### {self.values[num_equations - 1]}")
        )


def generate(count: int, *, seed: int, level: int, careless: float, split: str) -> list[PromptRow]:
    """`count` rows with different questions, the same ones for the same `seed` and `level`.

    With probability `careless` (0 to 1) the worked solution in `extra_info["answer"]` stops one equation early and reports that
    intermediate value, which is always wrong; `ground_truth` stays right. Problems of one step have no earlier value and stay right.
    A model that has learned from such solutions knows the steps and does not finish them: something to learn for RL.
    Raises UsageError for an unknown level, a `careless` outside [0, 1], or a `count` that the templates cannot make.
    """
    return _rows(_problems(count, seed, level), seed, careless, split)


def train_and_validation(
    num_train: int, num_val: int, *, seed: int, level: int, careless: float
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Rows for training and for validation that share no question. Only the training solutions are `careless`; see `generate`."""
    problems = _problems(num_train + num_val, seed, level)
    train, val = problems[:num_train], problems[num_train:]
    shared = {problem.question for problem in train} & {problem.question for problem in val}
    if shared:
        raise InternalError(
            f"{len(shared)} questions stand in both the training and the validation set"
        )
    return _rows(train, seed, careless, "train"), _rows(val, seed, 0.0, "val")


def _rows(problems: list[Problem], seed: int, careless: float, split: str) -> list[PromptRow]:
    if not 0 <= careless <= 1:
        raise UsageError(
            f"careless is a probability, given {careless}", hint="a number from 0 to 1"
        )
    coin = random.Random(f"careless-{seed}")  # its own stream: the questions do not depend on it
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
            f"level {level} does not exist", hint=f"one of {', '.join(map(str, LEVELS))}"
        )
    if count < 0:
        raise UsageError(f"cannot make {count} problems", hint="a number from 0 on")
    unique: dict[str, Problem] = {}
    repeats = 0
    for problem in _draws(random.Random(seed), LEVELS[level]):
        if len(unique) == count:
            break
        repeats = repeats + 1 if problem.question in unique else 0
        unique.setdefault(problem.question, problem)
        if repeats > PATIENCE:
            raise UsageError(
                f"level {level} has about {len(unique)} different problems, asked for {count}",
                hint="a higher --level or fewer rows",
            )
    return list(unique.values())


def _draws(rng: random.Random, level: Level) -> Iterator[Problem]:
    while True:
        yield _draw(rng, level)


def _draw(rng: random.Random, level: Level) -> Problem:
    name = rng.choice(list(PEOPLE))
    items = rng.choice(FOOD + THINGS)
    he, him = PEOPLE[name]
    words = {"name": name, "he": he, "him": him, "items": items}
    num_steps = rng.choice(level.steps)
    sentences, equations, values = [], [], []
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
    """A template, its operator and its number, such that the result lies in 1..largest. Numbers are at least 2: the items stay plural."""
    most = {
        "+": min(level.largest_given, level.largest - value),
        "-": min(level.largest_given, value - 1),
        "*": min(level.largest_factor, level.largest // value),
    }
    operator = rng.choice([each for each in "++--*" if most[each] >= 2])
    templates = {"+": ADD, "-": SUBTRACT_FOOD if items in FOOD else SUBTRACT, "*": MULTIPLY}[
        operator
    ]
    return rng.choice(templates), operator, rng.randint(2, most[operator])

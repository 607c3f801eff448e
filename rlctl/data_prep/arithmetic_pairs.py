"""Wrong solutions of the arithmetic problems, as the rejected half of preference pairs.

The quickstart's model stops early in 224 of 257 wrong responses, sampled at temperature 1; 23 of
the right length have a wrong result. In `miscounted_solution`, too, wrong results are rare, and
others have a step too many, so that "longer is better" does not describe the preferences.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from rlctl.data_prep.arithmetic import LEVELS, generate
from rlctl.data_prep.rows import PromptRow

_LEVEL = 2
_SLIP_SHARE = 0.1  # of miscounted solutions
_SLIPS = (-10, -2, -1, 1, 2, 10)
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def arithmetic_pairs(
    num_train: int, num_val: int, seed: int, *, miscounted: bool = False
) -> dict[str, list[PromptRow]]:
    """Return rows with the right solution in `chosen` and a wrong one in `rejected`.

    The splits share no question. The same seed makes the same rows. The wrong ones are those of
    `miscounted_solution` if `miscounted`, else those of `wrong_solution`.
    """
    make: Callable[[str, random.Random], str] = wrong_solution
    if miscounted:
        make = miscounted_solution
    rows = generate(num_train + num_val, seed=seed, level=_LEVEL, careless=0.0, split="train")
    rng = random.Random(f"pairs-{seed}")
    for index, row in enumerate(rows):
        chosen = row.extra_info.pop("answer")
        split = "train"
        if index >= num_train:
            split = "val"
        row.extra_info.update(split=split, chosen=chosen, rejected=make(chosen, rng))
    return {"train": rows[:num_train], "val": rows[num_train:]}


def wrong_solution(solution: str, rng: random.Random) -> str:
    """Return a solution that stops one equation early, or that has a wrong result in one.

    The equations after a wrong result continue with it, so its final result is wrong too.
    """
    *equations, _ = solution.split(" ; ")
    if len(equations) > 1 and rng.random() < 0.5:
        return _solution(equations[:-1])
    place = rng.randrange(len(equations))
    slips = _slips(equations[place])
    rng.shuffle(slips)
    return _with_result(equations, place, slips[0])


def miscounted_solution(solution: str, rng: random.Random) -> str:
    """Return a solution with an equation too few or too many, or with a wrong result in one.

    One in ten has a wrong result, with which the equations after it continue. Of the others, those
    of several equations stop early in two of three cases; the rest has an equation too many.
    """
    *equations, _ = solution.split(" ; ")
    if rng.random() >= _SLIP_SHARE:
        if len(equations) > 1 and rng.random() < 2 / 3:
            return _solution(equations[:-1])
        return _solution([*equations, rng.choice(_more(equations))])
    place = rng.randrange(len(equations))
    return _with_result(equations, place, rng.choice(_slips(equations[place])))


def _more(equations: list[str]) -> list[str]:
    """Return the equations that may follow the last one, with a number of the others.

    Their results are within the limits of the problems, so that their size gives nothing away.
    """
    value = _result(equations[-1])
    numbers = dict.fromkeys(int(equation.split(" = ")[0].split()[2]) for equation in equations)
    results = {
        f"{value} {sign} {number}": apply(value, number)
        for sign, apply in _OPERATORS.items()
        for number in (*numbers, 2)  # at least one of value ± 2 is within the limits
    }
    limit = LEVELS[_LEVEL].largest
    return [f"{left} = {result}" for left, result in results.items() if 1 <= result <= limit]


def _slips(equation: str) -> list[int]:
    """Return wrong results of an equation."""
    return [_result(equation) + slip for slip in _SLIPS if _result(equation) + slip > 0]


def _with_result(equations: list[str], place: int, value: int) -> str:
    """Return the solution whose equation at `place` has the result `value`."""
    written = [*equations[:place], f"{equations[place].split(' = ')[0]} = {value}"]
    for equation in equations[place + 1 :]:
        _, sign, number = equation.split(" = ")[0].split()
        result = _OPERATORS[sign](value, int(number))
        written.append(f"{value} {sign} {number} = {result}")
        value = result
    return _solution(written)


def _solution(equations: list[str]) -> str:
    return " ; ".join((*equations, f"#### {_result(equations[-1])}"))


def _result(equation: str) -> int:
    return int(equation.split(" = ")[1])

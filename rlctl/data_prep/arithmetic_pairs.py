"""Wrong solutions of the arithmetic problems, as the rejected half of preference pairs."""

from __future__ import annotations

import random

from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.rows import PromptRow

_SLIPS = (-10, -2, -1, 1, 2, 10)
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def arithmetic_pairs(num_train: int, num_val: int, seed: int) -> dict[str, list[PromptRow]]:
    """Return rows with the right solution in `chosen` and a wrong one in `rejected`.

    The splits share no question. The same seed makes the same rows.
    """
    rows = generate(num_train + num_val, seed=seed, level=2, careless=0.0, split="train")
    rng = random.Random(f"pairs-{seed}")
    for index, row in enumerate(rows):
        chosen = row.extra_info.pop("answer")
        row.extra_info.update(
            split="train" if index < num_train else "val",
            chosen=chosen,
            rejected=wrong_solution(chosen, rng),
        )
    return {"train": rows[:num_train], "val": rows[num_train:]}


def wrong_solution(solution: str, rng: random.Random) -> str:
    """Return a solution that stops one equation early, or that has a wrong result in one.

    The equations after a wrong result continue with it, so its final result is wrong too.
    """
    *equations, _ = solution.split(" ; ")
    if len(equations) > 1 and rng.random() < 0.5:
        kept = equations[:-1]
        return " ; ".join((*kept, f"#### {kept[-1].split(' = ')[1]}"))
    place = rng.randrange(len(equations))
    right = int(equations[place].split(" = ")[1])
    slips = [right + slip for slip in _SLIPS if right + slip > 0]
    rng.shuffle(slips)
    return next(_with_result(equations, place, value) for value in slips)


def _with_result(equations: list[str], place: int, value: int) -> str:
    """Return the solution whose equation at `place` has the result `value`."""
    written = [*equations[:place], f"{equations[place].split(' = ')[0]} = {value}"]
    for equation in equations[place + 1 :]:
        _, operator, number = equation.split(" = ")[0].split()
        result = _OPERATORS[operator](value, int(number))
        written.append(f"{value} {operator} {number} = {result}")
        value = result
    return " ; ".join((*written, f"#### {value}"))

"""Sums of two numbers, answered by the number alone: level 0 of `rlctl prep arithmetic`.

The prompt has the beginning of the assistant's message, `3 + 4 =`, which texts of a model's
pretraining continue by the sum. It is short: most tokens that a step computes are the prompts'.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from rlctl.data_prep.agent_columns import with_tools
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import UsageError

DATA_SOURCE = "rlctl/sums"
LARGEST = 20


def sums(
    num_train: int, num_val: int, seed: int, tools: Sequence[str]
) -> dict[str, list[PromptRow]]:
    """Return training and validation rows without common questions.

    Raises UsageError if they are more than the sums that there are.
    """
    pairs = list(product(range(1, LARGEST + 1), repeat=2))
    if num_train + num_val > len(pairs):
        raise UsageError(
            f"level 0 has {len(pairs)} different problems, requested {num_train + num_val}",
            hint="such as --train 304 --val 96, or use a higher --level",
        )
    random.Random(seed).shuffle(pairs)
    chosen = {"train": pairs[:num_train], "val": pairs[num_train : num_train + num_val]}
    return {
        split: with_tools([_row(split, i, *pair) for i, pair in enumerate(each)], tools)
        for split, each in chosen.items()
    }


def _row(split: str, index: int, first: int, second: int) -> PromptRow:
    question = f"{first} + {second}"
    truth = str(first + second)
    return PromptRow(
        data_source=DATA_SOURCE,
        prompt=[
            {"role": "system", "content": "Add."},
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{question} ="},
        ],
        ground_truth=truth,
        ability="math",
        style="rule",
        extra_info={"split": split, "index": index, "question": question, "answer": truth},
    )

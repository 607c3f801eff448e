"""Kinds of reward functions that `rlctl new` writes; completion imports nothing else."""

from __future__ import annotations

# What a reward function rewards, and the sentence after every prompt that asks for its form.
REWARDS = {
    "exact": ("the text after `Answer:`", 'End with "Answer:" and the answer alone.'),
    "number": ("the last number, as in GSM8K", ""),
    "math": ("a mathematically equal final answer", "Put the final answer in \\boxed{}."),
    "own": ("a function to change", ""),
}
OWN = "own"  # gets whole solutions instead of final answers

"""Reward functions that `rlctl new` copies into a project, where their user changes them."""

from __future__ import annotations

from pathlib import Path

# What a function rewards, and the sentence after every prompt that asks for the form it reads.
KINDS = {
    "exact": ("the text after `Answer:`", 'End with "Answer:" and the answer alone.'),
    "number": ("the last number, as in GSM8K", ""),
    "math": ("a mathematically equal final answer", "Put the final answer in \\boxed{}."),
    "own": ("a function to change", ""),
}


def source(kind: str) -> str:
    """Return the text of the file of a kind."""
    return (Path(__file__).parent / f"{kind}.py").read_text(encoding="utf-8")

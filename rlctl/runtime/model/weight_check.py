"""Comparison of weights with the model that a config describes, by transformers' loading.

transformers initializes missing weights at random and drops those that it does not expect, so a
folder with a wrong config would be trained from random layers. Its loading knows tied weights,
ignored names, and the renamed or merged weights of older checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from rlctl.errors import Problem

# Arguments of `from_pretrained`, which then also returns what `misfits` reads.
REPORTING: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
HEAD = "score"  # name of the head of transformers' sequence classifiers
_NUM_NAMED = 3  # weights that an error names


def check_fit(
    built: PreTrainedModel, weights: Mapping[str, Tensor], where: str, new_head: bool = False
) -> list[Problem]:
    """Return the problems of loading `weights` into the class of `built`.

    Both are on the meta device, without data; `weights` (N, ...) are those of the files, by name.
    """
    try:
        with quiet_loading():
            loaded: Any = type(built).from_pretrained(
                None,
                config=built.config,
                state_dict=dict(weights),
                device_map={"": "meta"},
                **REPORTING,
            )
    except (RuntimeError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        name = type(built).__name__
        return [Problem(f"the weights cannot be loaded into {name}: {reason}", where)]
    return misfits(built, loaded[1], where, new_head)


def misfits(
    built: PreTrainedModel, info: Mapping[str, Any], where: str, new_head: bool = False
) -> list[Problem]:
    """Return a problem each for missing weights, unexpected ones, and ones of another shape.

    `info` is what transformers reports of loading weights into the class of `built`. With
    `new_head`, the files may lack the weights of the head, or have those of another one.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    if new_head:
        missing = [name for name in missing if not name.startswith(f"{HEAD}.")]
    if new_head or built.base_model is built:  # a backbone leaves out the weights of a head
        parts = {built.base_model_prefix, *(name for name, _ in built.named_children())}
        unexpected = [name for name in unexpected if name.partition(".")[0] in parts]
    shapes = [
        f"{name} {tuple(found)} instead of {tuple(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    hint = "config.json and the weights belong to different models: download the model again"
    if unexpected == [f"{HEAD}.weight"]:
        hint = "a reward model writes no text: give the model that it was trained from"
    return [
        Problem(
            f"{_count(found)} {problem} {type(built).__name__} of config.json: {_some(found)}",
            where,
            hint,
        )
        for problem, found in (
            ("missing for", missing),
            ("not expected by", unexpected),
            ("of another shape than in", shapes),
        )
        if found
    ]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' report and progress bar: `misfits` reports the same as errors."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} weights are" if len(names) > 1 else "1 weight is"


def _some(names: Sequence[str]) -> str:
    named = ", ".join(names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return f"{named} and {rest} more" if rest > 0 else named

"""Reward functions: their type, and calls that cannot stop a run.

The signature is verl's; all arguments are passed by name:

    def compute_score(
        data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs
    ) -> float | dict: ...

A dict has the key `score`. Its key `pred`, if any, is the final answer that the function extracted
from the response: `maj@N` votes with it. Its other numbers are components of the score, for metrics
and for estimators that use them separately.

The function may be `async def`. A parameter named `prompt` gets the messages of the prompt. Three
attributes are set with `rlctl.plugins.declare`:

    scores_groups    one call has all responses to a prompt: the parameters are `data_source,
                     solution_strs, ground_truth, extra_infos`, and the result is a list with one
                     value per response; an exception in the list fails that response
    compares         a score needs another response to the same prompt
    limits_requests  an async function whose requests wait for the run's limits themselves (see
                     `requests`), so that its calls do not

This module and its imports stay light, without torch, because the worker processes of the pool load
them.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlctl.plugins import declare
from rlctl.runtime.sandbox.async_functions import is_async

RewardFunction = Callable[..., Any]

# Decorator of an entry point that is fast and needs no worker process.
in_process = declare(in_process=True)

TIMEOUT_HINT = "reward.timeout_s=N allows more time"

_LIBRARY = os.path.dirname(os.__file__)  # of Python
_MAX_SCORE = 3.4e38  # larger numbers are infinite in float32
log_failures: str | None = None  # file of the first tracebacks of this process; "": stderr
_MAX_TEXT = 2000  # characters of an error message or of an extracted answer


@dataclass(frozen=True)
class RewardSpec:
    """A reward function, its weight in the sum of scores, and its settings.

    `function` is an entry point's name, `module:function` or `path.py:function`. `sources` are the
    data sources that it scores; None: all.
    """

    function: str
    weight: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sources: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """The name of the function, without module or path."""
        return self.function.rpartition(":")[2]

    def scores(self, source: str) -> bool:
        """Return True if the function scores rows of the data source."""
        return self.sources is None or source in self.sources


_OF_PROMPT = {"prompt", "images"}


class Call(NamedTuple):
    """Arguments of one call of a reward function, or of one response of a group."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: Sequence[Mapping[str, Any]] = ()
    images: Sequence[bytes | str] = ()  # files of the prompt, or their paths


class Traits(NamedTuple):
    """Properties of a reward function that decide how it is called."""

    is_async: bool = False
    scores_groups: bool = False
    limits_requests: bool = False
    takes: tuple[str, ...] = ()  # of the prompt: `prompt`, `images`
    compares: bool = False

    @classmethod
    def of(cls, function: RewardFunction) -> Traits:
        """Read the traits of a function."""
        return cls(
            is_async=is_async(function),
            scores_groups=getattr(function, "scores_groups", False),
            limits_requests=getattr(function, "limits_requests", False),
            takes=tuple(_OF_PROMPT & inspect.signature(function).parameters.keys()),
            compares=getattr(function, "compares", False),
        )


class LoadedReward(NamedTuple):
    """A reward function with its keyword arguments."""

    function: RewardFunction
    kwargs: dict[str, Any]
    traits: Traits = Traits()

    def arguments(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the arguments for one call, or for the calls of a group."""
        first = calls[0]
        given: dict[str, Any] = {
            "data_source": first.data_source,
            "ground_truth": first.ground_truth,
        }
        if self.traits.scores_groups:
            given["solution_strs"] = [call.solution_str for call in calls]
            given["extra_infos"] = [call.extra_info for call in calls]
        else:
            given |= {"solution_str": first.solution_str, "extra_info": first.extra_info}
        of_prompt = {name: list(getattr(first, name)) for name in self.traits.takes}
        return {**given, **of_prompt, **self.kwargs}


class CallResult(NamedTuple):
    """Result of one call. The score is 0 if there is an `error`.

    `pred` is the final answer extracted from the response; None if the function returned none.
    """

    score: float
    components: dict[str, float]
    error: str | None = None
    timed_out: bool = False
    pred: str | None = None


class RewardTimeout(BaseException):
    """Raised inside a call that exceeds the time limit.

    It is no Exception, so that `except Exception` in a reward function does not catch it.
    """


def is_user_code(function: str) -> bool:
    """Return True for `module:function` and `path.py:function`, False for an entry point's name.

    User code is imported in worker processes only, where its import has a deadline.
    """
    return ":" in function


def call_reward(reward: LoadedReward, calls: Sequence[Call]) -> list[CallResult]:
    """Call a function once, for one call or the calls of a group; return a result for each.

    An exception or a wrong return value gives 0 and an error.
    """
    try:
        return _to_results(reward, reward.function(**reward.arguments(calls)), len(calls))
    except (Exception, SystemExit, RewardTimeout) as error:
        return [to_failure(error)] * len(calls)


async def call_async(reward: LoadedReward, calls: Sequence[Call]) -> list[CallResult]:
    """Await an async function: see `call_reward`."""
    try:
        return _to_results(reward, await reward.function(**reward.arguments(calls)), len(calls))
    except asyncio.CancelledError:
        raise
    except (Exception, SystemExit, RewardTimeout) as error:
        return [to_failure(error)] * len(calls)


def to_failure(error: BaseException) -> CallResult:
    """Return the result of a call that raised `error`; log its traceback: see `log_failures`."""
    if log_failures is not None:
        from rlctl.runtime.rewards.failure_log import FAILURES

        FAILURES.add(error, log_failures)
    if isinstance(error, RewardTimeout):
        return CallResult(0.0, {}, str(error), timed_out=True)
    message = f"{type(error).__name__}: {error}"
    text = f"{message:.{_MAX_TEXT}}{_cause(error)}"
    return CallResult(0.0, {}, text, timed_out=isinstance(error, TimeoutError))


def _to_results(reward: LoadedReward, result: Any, num_calls: int) -> list[CallResult]:
    """Convert a return value: one result, or a list of `num_calls` for a group."""
    if not reward.traits.scores_groups:
        return [_to_result(result)]
    if not isinstance(result, Sequence) or len(result) != num_calls:
        raise TypeError(
            f"the reward function returned {result!r:.60}, not a list with a score for each of "
            f"{num_calls} responses"
        )
    return [_element(element) for element in result]


def _element(result: Any) -> CallResult:
    """Convert one element of a group's list."""
    try:
        if isinstance(result, Exception):
            return to_failure(result)
        return _to_result(result)
    except (TypeError, ValueError, OverflowError) as error:
        return to_failure(error)


def _to_result(result: Any) -> CallResult:
    """Convert a return value. Raises TypeError or ValueError if it has no finite score."""
    parts = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in parts:
        raise TypeError(f"the reward function returned a dict without 'score': {sorted(parts)}")
    value = parts["score"]
    if value is None or isinstance(value, str | bytes | list | tuple):
        raise TypeError(
            f"the reward function returned {value!r:.60}, not a number or a dict with 'score'"
        )
    score = float(value)
    if not abs(score) <= _MAX_SCORE:
        raise ValueError(f"the reward function returned {score}")
    others = {
        str(name): _to_number(part) for name, part in parts.items() if name not in ("score", "pred")
    }
    pred = parts.get("pred")
    return CallResult(
        score,
        {name: part for name, part in others.items() if abs(part) <= _MAX_SCORE},
        pred=None if pred is None else f"{pred!s:.{_MAX_TEXT}}",
    )


def _to_number(part: Any) -> float:
    """Return a number, or numpy's or torch's value that holds one, as a float; NaN for others."""
    if isinstance(part, str) or not hasattr(part, "__float__"):
        return math.nan
    try:
        return float(part)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _cause(error: BaseException) -> str:
    """Return " (file:line)" of the innermost frame, if possible of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__]
    users = [
        frame
        for frame in inside
        if not frame.filename.startswith(("<", _LIBRARY)) and "site-packages" not in frame.filename
    ]
    last = (users or inside)[-1:]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)

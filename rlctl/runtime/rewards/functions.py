"""Reward functions: their type, and calls that cannot stop a run.

The signature is verl's; all arguments are passed by name:

    def compute_score(
        data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs
    ) -> float | dict: ...

A dict has the key `score`. Its key `pred`, if any, is the final answer that the function extracted
from the response: `maj@N` votes with it. Its other numbers are components of the score, for metrics
and for estimators that use them separately. This module and its imports stay light, without torch,
because the worker processes of the pool load them.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeVar

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)

_IN_PROCESS = "__rlctl_in_process__"
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


class Call(NamedTuple):
    """Arguments of one call of a reward function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


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


def in_process(function: F) -> F:
    """Declare that `function`, an entry point, is fast and needs no worker process."""
    setattr(function, _IN_PROCESS, True)
    return function


def runs_in_process(function: RewardFunction) -> bool:
    """Return True if `function` is declared with `in_process`."""
    return getattr(function, _IN_PROCESS, False)


def call_reward(function: RewardFunction, call: Call, kwargs: Mapping[str, Any]) -> CallResult:
    """Call `function` once. An exception or a wrong return value gives 0 and an error."""
    try:
        return _to_result(function(**call._asdict(), **kwargs))
    except RewardTimeout as error:
        return CallResult(0.0, {}, str(error), timed_out=True)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}"
        return CallResult(0.0, {}, f"{message:.{_MAX_TEXT}}{_cause(error)}")


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
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score}")
    others = {
        str(name): float(part)
        for name, part in parts.items()
        if name not in ("score", "pred") and isinstance(part, Real)
    }
    pred = parts.get("pred")
    return CallResult(
        score,
        {name: part for name, part in others.items() if math.isfinite(part)},
        pred=None if pred is None else f"{pred!s:.{_MAX_TEXT}}",
    )


def _cause(error: BaseException) -> str:
    """Return " (file:line)" of the innermost frame outside this file."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__]
    return f" ({inside[-1].filename}:{inside[-1].lineno})" if inside else ""

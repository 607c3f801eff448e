"""Sources of a step's rollouts: what all have in common, and collection in the step itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from rlctl.runtime.base.batch import Rollouts, Scored
from rlctl.runtime.base.clock import Clock
from rlctl.runtime.base.roles import Published, Roles
from rlctl.runtime.training.collector import Collector


@dataclass(frozen=True, eq=False)
class Collected:
    """Rollouts that `step` learns from, and their metrics.

    They were generated under the weights that step `weights` left; 0: the initial ones.
    """

    step: int
    weights: int
    scored: Scored
    metrics: dict[str, float]


@dataclass(frozen=True)
class GroupRecord:
    """A group that was admitted when `version` steps had learned; `drawn` is its prompt."""

    number: int  # of the groups of the run, from 0
    drawn: int
    version: int


@dataclass(frozen=True, eq=False)
class StreamState:
    """Groups that no step has learned from, for checkpoints.

    The responses to `open` ones are generated again after a resume. `finished_rollouts` has those
    of the finished ones, in their order. `steps` has the step that left each version of weights.
    """

    num_admitted: int
    open: list[GroupRecord]
    finished: list[GroupRecord]
    steps: dict[int, int]
    finished_rollouts: Rollouts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all but the rollouts as plain data."""
        return {
            "num_admitted": self.num_admitted,
            "open": [asdict(group) for group in self.open],
            "finished": [asdict(group) for group in self.finished],
            "steps": list(self.steps.items()),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], rollouts: Rollouts | None) -> Self:
        """Return what `to_dict` returned, with the rollouts."""
        return cls(
            data["num_admitted"],
            [GroupRecord(**group) for group in data["open"]],
            [GroupRecord(**group) for group in data["finished"]],
            dict(data["steps"]),
            rollouts,
        )


@dataclass(frozen=True, eq=False)
class CollectionSetup:
    """Parts of a collection of rollouts ahead of learning, up to those for step `last`.

    `publish` makes the trained weights those that engines load next. `clock` counts the time that
    the trainer waits. `ahead` are rollouts of a checkpoint.
    """

    collector: Collector
    roles: Roles
    publish: Callable[[], Published]
    clock: Clock
    last: int
    ahead: Collected | None = None


@dataclass(frozen=True, eq=False)
class SourceState:
    """State of a source after a step; `loader` and `reward` are those of collector and reward."""

    ahead: Collected | None
    loader: dict[str, Any]
    reward: dict[str, Any]
    stream: Callable[[], StreamState | None] = lambda: None  # joins rollouts, so only for a save


class RolloutSource(Protocol):
    """Source of the rollouts of a run, one step after another.

    `ahead` are rollouts that are collected and that no step has learned from. `seconds` are those
    by phase of the last collection that ran beside a step. While `quiet` is held, `ahead` and the
    state of rewards and samplers do not change.
    """

    ahead: Collected | None
    seconds: dict[str, float]
    quiet: AbstractContextManager[object]

    def take(self, step: int) -> tuple[Scored, dict[str, float]]:
        """Return the rollouts that `step` learns from, and metrics."""
        ...

    def state(self) -> SourceState:
        """Return the state after a step, for checkpoints, without waiting."""
        ...

    def end_step(self) -> dict[str, float]:
        """Wait for what was begun beside the learning of the step; return metrics.

        Afterwards the engines are idle and `update_weights` loads the weights that the step left.
        """
        ...


class InStep(RolloutSource):
    """Rollouts that are collected in the step that learns from them, under its weights.

    A run that was one step ahead may have left some in its checkpoint.
    """

    def __init__(self, collector: Collector, roles: Roles, ahead: Collected | None) -> None:
        self.collector = collector
        self.roles = roles
        self.ahead = ahead
        self.seconds = {}
        self.quiet = nullcontext()

    def take(self, step: int) -> tuple[Scored, dict[str, float]]:
        left = self.ahead
        self.ahead = None
        if left is None:
            return self.collector.collect(self.roles, step)
        from rlctl.runtime.training.one_step_ahead import with_staleness

        scored, metrics = with_staleness(left.scored, step, left.weights, limit=0)
        return scored, left.metrics | metrics

    def state(self) -> SourceState:
        return state_of(self.collector, self.roles, self.ahead)

    def end_step(self) -> dict[str, float]:
        return {}


def state_of(collector: Collector, roles: Roles, ahead: Collected | None) -> SourceState:
    """Return the state of a source that has nothing but `ahead`."""
    return SourceState(ahead, collector.state_dict(), roles.reward.state_dict())

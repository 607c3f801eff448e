"""What a tracker is and what it is told: the run, its metrics, its validation answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of its run. `total_steps` is the last training step; `config` is the composed configuration as plain data.

    `trackers` maps a logger to the id that it gave the run in an earlier attempt; `resume_step` is the last step of the history that the
    tracker is known to have, 0 in a new run; the steps after it are told, or told again. `modes` has what the recipe says of a logger
    (online, offline, …); a logger that is not in it decides by its own environment variables.
    """

    id: str
    project: str
    name: str
    folder: Path
    total_steps: int
    config: Mapping[str, Any]
    trackers: Mapping[str, str] = field(default_factory=dict)
    resume_step: int = 0
    modes: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[str] = ()
    description: str | None = None
    num_samples: int = 0
    sample_seed: int = 0

    def shown(self, samples: Sequence[Sample]) -> list[Sample]:
        """The `num_samples` of a step's answers that trackers show: those to the same prompts each time, chosen by `sample_seed`."""
        chosen = random.Random(self.sample_seed).sample(
            range(len(samples)), min(self.num_samples, len(samples))
        )
        return [samples[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class Sample:
    """One validation answer: `length` in response tokens, `finish` says why it ended, `components` are the parts of `score` by name."""

    prompt: str
    response: str
    ground_truth: Any
    score: float
    components: Mapping[str, float]
    length: int
    finish: str
    data_source: str

    @property
    def right(self) -> bool:
        """Whether it counts as a correct answer: its accuracy (the component `acc`, or else the score) is at least a half."""
        return self.components.get("acc", self.score) >= 0.5


class Tracker(Protocol):
    """Takes the record of a run, in this order: `start`, then `log` and `generations` with growing steps, then `finish`.

    Made without arguments and called from one thread, which is not the run's own: it may be slow, and what it raises stops nothing but
    itself. `start` returns the id under which a later attempt finds the same history (`RunInfo.trackers`), or None where there is no such
    thing; an id that is new although the run has a history gets that history first. `log` gets finite numbers only. `state` is the run's
    last: finished, failed or stopped.
    """

    def start(self, run: RunInfo) -> str | None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def generations(self, step: int, samples: Sequence[Sample]) -> None: ...

    def finish(self, state: str) -> None: ...


@runtime_checkable
class Preflight(Protocol):
    """A tracker class that can say before a run what it would do."""

    @classmethod
    def preflight(cls, mode: str | None) -> str:
        """The mode that it would run in, in a few words; `mode` is what the recipe says. Errors: RlctlError with cause and remedy.

        Opens nothing, writes nothing, and takes two seconds at most.
        """
        ...


@runtime_checkable
class ShowsPhases(Protocol):
    """A tracker that shows what the run is doing now, and is therefore called in the run's own thread: it must not wait for anything.

    Phases before `start` are those of starting up; a run that fails early may `finish` before it starts. It gets every metric, NaN and
    infinities included.
    """

    def phase(self, name: str) -> None: ...


class Event(Protocol):
    """Where events go: `RunDir.event`."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...

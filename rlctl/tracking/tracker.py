"""Tracker protocol, and the data that trackers receive."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rlctl.episodes import Episode

SAMPLES = "val/generations"  # name of the samples among the metrics, for `ReadsBack`
NUM_SHOWN = 8  # default of trainer.log_val_generations with a tracker that `shows_samples`


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run for its trackers.

    `total_steps` is the last training step and `config` the composed configuration as plain data.
    `trackers` maps a logger to the id that it gave the run in an earlier attempt. `resume_step` is
    the last step that the tracker is known to have (0 in a new run); later steps are sent, some of
    them perhaps again. `modes` maps a logger to its mode in the recipe (online, offline, …); other
    loggers decide by their environment variables. `sweep` is the name of the sweep that started the
    run, `attempt` counts from 1, and `commit` is that of the code in the folder of the command.
    `lost` returns the ids that a logger gave to runs of the project that were killed.
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
    recipe: str = ""
    sweep: str | None = None
    attempt: int = 1
    commit: str | None = None
    lost: Callable[[str], Sequence[str]] = lambda _: ()

    def select_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Select `num_samples` of a step's samples, at positions fixed by `sample_seed`."""
        chosen = random.Random(self.sample_seed).sample(
            range(len(samples)), min(self.num_samples, len(samples))
        )
        return [samples[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class Sample:
    """One validation response with its prompt and score.

    `length` counts response tokens, `finish` is the reason why generation ended, `components` are
    the named parts of `score`, and `pred` is the answer that the reward function extracted; if it
    `failed`, the score is 0. The response of an `episode` is all that follows the prompt, with the
    replies to the policy. `images` are the SHA-256 of the files of the prompt's images.
    """

    prompt: str
    response: str
    ground_truth: Any
    score: float
    components: Mapping[str, float]
    length: int
    finish: str
    data_source: str
    pred: str | None = None
    episode: Episode | None = None
    images: Sequence[str] = ()
    failed: bool = False

    @property
    def verdict(self) -> str:
        """`right`, `wrong` or `reward failed`."""
        if self.failed:
            return "reward failed"
        if self.right:
            return "right"
        return "wrong"

    @property
    def right(self) -> bool:
        """True if the accuracy (the component `acc`, or else the score) is at least 0.5."""
        return self.components.get("acc", self.score) >= 0.5

    @property
    def is_finished(self) -> bool:
        """True if the response ended by itself: neither cut, nor of an episode that failed."""
        return self.finish == "stop" and not (self.episode and self.episode.failed)


class Tracker(Protocol):
    """Logger integration. Built without arguments and called from one thread, not the run's.

    Calls come in this order: `start`, then `log` and `generations` with increasing steps, then
    `finish`. A tracker may be slow, and its exceptions never stop the run. A class whose attribute
    `shows_samples` is true gets samples by default. The optional method `failure` receives the
    message of the error that ended a run, before `finish`; see `ShowsAlarms` for `alarm`.
    """

    def start(self, run: RunInfo) -> str | None:
        """Start or resume tracking, and return the tracker's id of the run, None without one.

        A later attempt receives the id in `RunInfo.trackers`. If the id is new although the run has
        a history, that history is sent first.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a training step; all values are finite."""
        ...

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Record validation samples of a training step."""
        ...

    def finish(self, state: str) -> None:
        """Close the run; `state` is finished, failed or stopped."""
        ...


@runtime_checkable
class Preflight(Protocol):
    """Tracker class that can report its mode before the run starts.

    `preflight` is a class method, or a method of a tracker whose settings decide.
    """

    def preflight(self, mode: str | None) -> str:
        """Return in a few words the mode that the tracker would use; `mode` comes from the recipe.

        Opens and writes nothing, and takes at most two seconds. Raises RlctlError with a hint if
        the tracker cannot start.
        """
        ...


@runtime_checkable
class ReadsBack(Protocol):
    """Tracker that reads back what its server has.

    Replayed steps that the server has are not sent again. `confirms` is true in a class whose calls
    return before the data is stored: an attempt then counts as delivered only if the server has
    all of its steps after `finish`.
    """

    confirms: bool

    def received(self, names: Collection[str]) -> Mapping[str, Collection[int]] | None:
        """Return the steps of each of these metrics that the server has; `SAMPLES` for samples.

        None without a server. Called between the calls of other methods, and after `finish`. May
        raise any exception if the server does not answer.
        """
        ...


@runtime_checkable
class ShowsPhases(Protocol):
    """Tracker that shows the current phase. It runs in the run's thread and must not block.

    Phases before `start` belong to the startup. A run that fails early may call `finish` without
    `start`. Such a tracker receives all metrics, including NaN and infinities. Its method
    `episodes`, if it has one, gets the number of episodes by state, and {} once all have ended.
    """

    def phase(self, name: str) -> None:
        """Show that the run enters the phase `name`."""
        ...


class Event(Protocol):
    """Function that appends an event to the run's event log; see `RunDir.event`."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Append an event with these fields."""
        ...

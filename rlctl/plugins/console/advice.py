"""Advice about the speed of a run: the phase that holds it back, a key to change, and the gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.errors import NotFoundError
from rlctl.runs.run import Run

_NEWEST = 20  # steps that are averaged
_FIRST = 2  # steps before them, which warm up
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
_IN_STEP = "timing_s/step"
Seconds = Mapping[str, float]
Setting = Callable[[str], Any]


@dataclass(frozen=True)
class Hint:
    """Change of a setting for a phase.

    `saved` returns the seconds of a step that it saves at most; None if the metrics do not tell.
    `applies` returns False for a run that has it already.
    """

    phase: str
    change: str
    why: str
    saved: Callable[[Seconds], float] | None = None
    applies: Callable[[Setting], bool] = lambda _: True


def _of(phase: str, share: float = 1.0) -> Callable[[Seconds], float]:
    return lambda seconds: share * seconds.get(phase, 0.0)


def _beside(phase: str, other: str) -> Callable[[Seconds], float]:
    """Return what is saved if `phase` runs beside `other`; `step` is the rest of the step."""

    def saved(seconds: Seconds) -> float:
        alone = seconds.get(phase, 0.0)
        if other == "step":
            return min(alone, seconds["step"] - alone)
        return min(alone, seconds.get(other, 0.0))

    return saved


HINTS = (
    Hint(
        "gen",
        "async_training.max_staleness=1, with a separate pool for trainer.placement.rollout",
        "generation beside training: a step takes the longer of the two; needs other devices",
        _beside("gen", "step"),
        lambda get: not get("async_training.max_staleness"),
    ),
    Hint(
        "reward",
        "reward.overlap=true",
        "scoring during generation: the shorter of the two",
        _beside("reward", "gen"),
        lambda get: get("reward.overlap") is False,
    ),
    Hint(
        "reward",
        "reward.num_processes, twice as many",
        "half of the waiting, if cores are idle and the function does not wait for a server",
        _of("reward", 1 / 2),
    ),
    Hint(
        "old_log_prob",
        f"{_BYPASS}=true",
        "the pass is left out, and the engine's log-probs are used: check rollout_probs_diff_mean",
        _of("old_log_prob"),
        lambda get: not get(_BYPASS),
    ),
    Hint(
        "update_actor",
        f"{_CHECKPOINTING}=false",
        "a quarter: one of two forward passes, and the backward pass counts as two; more memory",
        _of("update_actor", 1 / 4),
        lambda get: bool(get(_CHECKPOINTING)),
    ),
    Hint(
        "update_actor",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, twice as many",
        "larger micro-batches, if memory is free; not known from these metrics",
    ),
    Hint(
        "testing",
        "trainer.test_freq, twice as large",
        "half of the validations",
        _of("testing", 1 / 2),
    ),
    Hint(
        "save_checkpoint",
        "trainer.save_freq, twice as large",
        "half of the checkpoints",
        _of("save_checkpoint", 1 / 2),
    ),
)


def advice(run: Run) -> dict[str, Any]:
    """Return the seconds of each phase per step, and hints, those with the largest gain first.

    Validations and checkpoints are divided by the number of steps. Raises NotFoundError for a run
    without steps.
    """
    rows = [row for row in run.history() if _IN_STEP in row]
    rows = (rows[_FIRST:] or rows)[-_NEWEST:]
    if not rows:
        raise NotFoundError("no step of this run has been timed", where=str(run.path))
    names = {name for row in rows for name in row if name.startswith("timing_s/")}
    seconds = {
        name.removeprefix("timing_s/"): sum(row.get(name, 0.0) for row in rows) / len(rows)
        for name in names
    }
    total = seconds["step"] + sum(seconds.get(name, 0.0) for name in ("testing", "save_checkpoint"))
    shares = {name: value / total for name, value in seconds.items() if name != "step"}
    slowest = max(shares, key=lambda name: shares[name], default=None)
    hints: list[dict[str, Any]] = []
    for hint in HINTS:
        gain = None
        is_relevant = hint.phase == slowest
        if hint.saved is not None:
            gain = hint.saved(seconds) / total
            is_relevant = gain >= 0.02
        if hint.phase in shares and is_relevant and hint.applies(run.setting):
            hints.append(
                {"phase": hint.phase, "change": hint.change, "gain": gain, "why": hint.why}
            )
    hints.sort(key=lambda found: -(found["gain"] or 0.0))
    phases = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    return {
        "steps": [int(rows[0]["step"]), int(rows[-1]["step"])],
        "seconds": phases,
        "shares": shares,
        "slowest": slowest,
        "hints": hints,
    }

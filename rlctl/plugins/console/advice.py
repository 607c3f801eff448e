"""Advice about the speed of a run: the phase that holds it back, a key to change, and the gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.errors import NotFoundError
from rlctl.runs.run import Run

_NEWEST, _FIRST = 20, 2  # steps that are averaged, after the first ones, which warm up
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
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


def _rest(seconds: Seconds) -> float:
    return max(0.0, seconds["step"] - seconds.get("gen", 0.0))


HINTS = (
    Hint(
        "gen",
        "async_training.max_staleness=1, with a pool of its own for trainer.placement.rollout",
        "generation beside training: a step takes the longer of the two; needs other devices",
        lambda s: min(s.get("gen", 0.0), _rest(s)),
        lambda get: not get("async_training.max_staleness"),
    ),
    Hint(
        "gen",
        f"{_ROLLOUT}.name=vllm",
        "a faster engine on GPUs; not known from these metrics",
        None,
        lambda get: get(f"{_ROLLOUT}.name") == "hf",
    ),
    Hint(
        "reward",
        "reward.overlap=true",
        "scoring during generation: all of the shorter of the two",
        lambda s: min(s.get("reward", 0.0), s.get("gen", 0.0)),
        lambda get: get("reward.overlap") is False,
    ),
    Hint(
        "reward",
        "reward.num_processes, twice as many",
        "half of the waiting, if cores are idle and the function does not wait for a server",
        lambda s: s.get("reward", 0.0) / 2,
    ),
    Hint(
        "old_log_prob",
        "algorithm.rollout_correction.bypass_mode=true",
        "the pass is left out, and the engine's log-probs are used: check rollout_probs_diff_mean",
        lambda s: s.get("old_log_prob", 0.0),
        lambda get: not get("algorithm.rollout_correction.bypass_mode"),
    ),
    Hint(
        "update_actor",
        f"{_CHECKPOINTING}=false",
        "a quarter of the update: one of two forward passes is left out, the backward pass counts "
        "as two; takes more memory",
        lambda s: s.get("update_actor", 0.0) / 4,
        lambda get: bool(get(_CHECKPOINTING)),
    ),
    Hint(
        "update_actor",
        f"{_ACTOR}.ppo_max_token_len_per_gpu, twice as many",
        "larger micro-batches, if memory is free; not known from these metrics",
    ),
    Hint(
        "testing",
        "trainer.test_freq, twice as large",
        "half of the validations",
        lambda s: s.get("testing", 0.0) / 2,
    ),
    Hint(
        "save_checkpoint",
        "trainer.save_freq, twice as large",
        "half of the checkpoints",
        lambda s: s.get("save_checkpoint", 0.0) / 2,
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
        gain = hint.saved(seconds) / total if hint.saved else None
        relevant = hint.phase == slowest if gain is None else gain >= 0.02
        if hint.phase in shares and relevant and hint.applies(run.setting):
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

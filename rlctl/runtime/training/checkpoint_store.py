"""Checkpoints of a run: one folder per step, complete or absent.

A checkpoint is written to a temporary folder, listed with sizes and hashes, flushed to disk and
renamed. It holds the distributed state of each learning role (`actor/`, `critic/`, independent of
the number of ranks), the controller's state (`state.json`), the configuration (`config.yaml`) and
the policy in the format of transformers and vLLM (`huggingface/`). Older ones are deleted unless
`max_ckpt_to_keep` or `keep_best` keeps them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rlctl.errors import ConfigError
from rlctl.files import by_step, put_in_place, read_record, step_name
from rlctl.json_values import finite
from rlctl.recipes import schema
from rlctl.runs.provenance import installed_versions
from rlctl.runtime.workers.background import PARTS, WRITING, begin_writing

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
ROWS = "metrics_rows.jsonl"  # rows of metrics.jsonl that were not certainly on disk
# Folders of `stored_rollouts`, if any.
ROLLOUTS = "rollouts"  # of the next step
GROUPS = "groups"  # of groups of later steps


@dataclass(frozen=True)
class ControllerState:
    """State of the controller after `step`, beside what the workers save.

    `metrics` are those of the step; the best checkpoints are selected by them. `loader` is the
    state of the `Collector`. `trackers` is for readers only: the run's record holds the ids.
    """

    step: int
    run: str
    algorithm: dict[str, Any]
    skipped_in_a_row: int
    rng: dict[str, Any]
    metrics: dict[str, float | None] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] = field(default_factory=dict)
    trackers: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    seeds: dict[str, int] = field(default_factory=dict)
    # Of rollouts in the checkpoint, which the next step learns from: the step whose weights
    # generated them, and their metrics. None: the checkpoint has no rollouts.
    ahead: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None  # of `schedule=eager`: see `StreamState`
    pending: bool = False  # the validation of the step is still to run, and then its report

    def write(self, folder: Path) -> None:
        """Write `state.json` into `folder`, with null for metrics that are not finite.

        Raises ValueError for another number that is not finite.
        """
        state = asdict(self) | {"metrics": finite(self.metrics)}
        if self.ahead is not None:
            state["ahead"] = self.ahead | {"metrics": finite(self.ahead["metrics"])}
        (folder / STATE).write_text(json.dumps(state, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `state.json`; raise `ConfigError` if `folder` is not a checkpoint of this format."""
        try:
            state = cls(**json.loads(read_record(folder / STATE)))
            if state.ahead is not None:  # they are logged with the next step
                metrics = state.ahead["metrics"].items()
                state.ahead["metrics"] = {k: math.nan if v is None else v for k, v in metrics}
            return state
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"not an rlctl checkpoint: {type(error).__name__}: {error}", where=str(folder)
            ) from error

    @property
    def pending_metrics(self) -> dict[str, float] | None:
        """Return the metrics of a step that is to be validated and reported, else None."""
        if not self.pending:
            return None
        return {name: math.nan if x is None else x for name, x in self.metrics.items()}


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of one run, in `folder`."""

    folder: Path

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Return the steps with a completely written checkpoint, oldest first."""
        return [step for step, path in self.folders().items() if (path / MANIFEST).exists()]

    def folders(self) -> dict[int, Path]:
        """Return the folder of each checkpoint, also of a damaged one, oldest first."""
        return {step: path for step, path in by_step(self.folder).items() if path.is_dir()}

    def begin(self, step: int) -> Path:
        """Create an empty temporary folder for `step`, and remove those of interrupted writes."""
        self.clear()
        aside = self.folder / f".{self.path(step).name}.partial"
        aside.mkdir(parents=True)
        begin_writing(aside)
        return aside

    def finish(self, step: int, contents: Sequence[str] = PARTS) -> Path:
        """Write the manifest of the temporary folder of `step`, flush it to disk and rename it."""
        final = self.path(step)
        aside = self.folder / f".{final.name}.partial"
        files = sorted(path for path in aside.rglob("*") if path.is_file() and path.name != WRITING)
        listing = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": digest(path)}
            for path in files
        }
        manifest = {
            "step": step,
            "contents": contents,
            "config_sha256": listing[CONFIG]["sha256"],
            "versions": installed_versions(),
            "files": listing,
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        put_in_place(aside, final)
        (final / WRITING).unlink(missing_ok=True)  # until the rename it means: not given up
        return final

    def clear(self) -> None:
        """Remove the temporary folders of interrupted writes."""
        for partial in self.folder.glob(".step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Delete a checkpoint. It is renamed first, so a partly deleted one is never listed."""
        temporary = self.path(step).with_name(f".{self.path(step).name}.partial")
        self.path(step).rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)  # `clear` removes what is left

    def set_aside_after(self, step: int, into: str) -> list[int]:
        """Move the checkpoints after `step` into the subfolder `into`; return their steps.

        The newest goes first: after an interruption, none is left that follows a moved one.
        """
        later = {number: path for number, path in self.folders().items() if number > step}
        for path in reversed(later.values()):
            (self.folder / into).mkdir(exist_ok=True)
            path.rename(self.folder / into / path.name)
        return list(later)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep: the newest, and the best by a metric.

    `newest` is their number; None: all. `metric` is None where no best ones are kept.
    """

    newest: int | None
    metric: str | None
    largest: bool
    k: int

    @classmethod
    def from_config(cls, trainer: schema.Trainer) -> Retention:
        """Return the retention set by `trainer.max_ckpt_to_keep` and `trainer.keep_best`."""
        best = trainer.keep_best
        return cls(trainer.max_ckpt_to_keep, best.metric, best.mode == "max", best.k)

    def to_delete(self, metrics: Mapping[int, Mapping[str, float | None]]) -> list[int]:
        """Return the steps whose checkpoints may be deleted, never the newest.

        `metrics` maps each step with a checkpoint to its metrics. Of equal checkpoints the older
        one counts as better.
        """
        steps = sorted(metrics)
        if self.newest is None:
            return []
        values = {
            step: value
            for step in steps
            if (value := metrics[step].get(self.metric or "")) is not None
        }
        best = sorted(
            values, key=lambda step: (-values[step] if self.largest else values[step], step)
        )[: self.k]
        return [step for step in steps[: -self.newest] if step not in best]


def metrics_at(checkpoint: Path) -> Mapping[str, float | None]:
    """Return the metrics of a checkpoint's step; empty, so never best, if they cannot be read."""
    try:
        return metrics_in((checkpoint / STATE).read_bytes())
    except OSError:
        return {}


def metrics_in(state: bytes) -> Mapping[str, float | None]:
    """Return the metrics in the content of a checkpoint's `state.json`; empty if it is damaged."""
    try:
        return dict(json.loads(state)["metrics"])
    except (ValueError, TypeError, KeyError):
        return {}

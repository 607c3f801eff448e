"""Checkpoints: one folder a step, whole or not there.

A checkpoint is written into a folder beside its place, listed with sizes and hashes, flushed to the disk and renamed. It holds the
distributed state of actor and critic (`actor/`, `critic/`, independent of the number of ranks), the controller's state (`state.json`),
the configuration (`config.yaml`) and the policy as transformers and vLLM load it (`huggingface/`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rlctl.errors import ConfigError, NotFoundError
from rlctl.files import put_in_place
from rlctl.runs.provenance import installed_versions

MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.yaml"


@dataclass(frozen=True)
class ControllerState:
    """What the controller needs to go on after `step`, beside what the workers have saved.

    `metrics` are those of the step: by them the best checkpoints are known. `loader` is what `Collector` goes on from. `trackers` is a
    record for readers: the run's own record holds the ids.
    """

    step: int
    run: str
    algorithm: dict[str, Any]
    skipped_in_a_row: int
    rng: dict[str, Any]
    metrics: dict[str, float | None] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    trackers: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    seeds: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        metrics = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in self.metrics.items()
        }
        (folder / STATE).write_text(
            json.dumps(asdict(self) | {"metrics": metrics}, allow_nan=False) + "\n"
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Errors: ConfigError when `folder` is no checkpoint, or one of another format."""
        try:
            return cls(**json.loads((folder / STATE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"not a checkpoint of rlctl: {type(error).__name__}: {error}", where=str(folder)
            ) from error


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in `folder`."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """The steps with a checkpoint that was written to its end, oldest first."""
        return sorted(
            int(path.parent.name.removeprefix("step_"))
            for path in self.folder.glob(f"step_*/{MANIFEST}")
        )

    def begin(self, step: int) -> Path:
        """An empty folder beside the place of `step`, to write into. What an interrupted write left behind is removed."""
        self.clear()
        aside = self.folder / f".{self.path(step).name}.partial"
        aside.mkdir(parents=True)
        return aside

    def finish(self, step: int) -> Path:
        """List what was written for `step`, flush it to the disk and give it its name. Nothing half-written ever carries that."""
        final = self.path(step)
        aside = self.folder / f".{final.name}.partial"
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        listing = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for path in files
        }
        manifest = {
            "step": step,
            "config_sha256": listing[CONFIG]["sha256"],
            "versions": installed_versions(),
            "files": listing,
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if final.exists():
            shutil.rmtree(final)
        put_in_place(aside, final)
        return final

    def clear(self) -> None:
        """Remove what writes that did not come to their end have left."""
        for partial in self.folder.glob(".step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Delete a checkpoint; from the first moment on it no longer counts as one."""
        doomed = self.path(step).with_name(f".{self.path(step).name}.partial")
        self.path(step).rename(doomed)
        shutil.rmtree(doomed)

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """The newest step whose checkpoint is undamaged (None: there is none), and what is wrong with each newer one."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            problem = damage(self.path(step))
            if problem is None:
                return step, damaged
            damaged.append(problem)
        return None, damaged

    def set_aside_after(self, step: int, into: str) -> list[int]:
        """Move the checkpoints of steps after `step` into a folder `into` among the others, where they no longer count. Their steps."""
        later = [each for each in self.steps() if each > step]
        for each in later:
            (self.folder / into).mkdir(exist_ok=True)
            self.path(each).rename(self.folder / into / self.path(each).name)
        return later

    def policy(self, step: int | None = None) -> Path:
        """The transformers folder of `step`, or of the newest checkpoint."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            there = ", ".join(map(str, steps)) or "none"
            raise NotFoundError(
                f"no checkpoint {'' if step is None else f'of step {step} '}in {self.folder}",
                hint=f"steps there: {there}",
            )
        return self.path(steps[-1] if step is None else step) / "huggingface"


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file of its manifest must be there, of its size and with its SHA-256."""
    try:
        listing: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{folder.name} is damaged: {MANIFEST} cannot be read ({type(error).__name__})"
    for name, wanted in listing.items():
        file = folder / name
        if not file.is_file():
            return f"{folder.name} is damaged: {name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{folder.name} is damaged: {name} has {file.stat().st_size} bytes and should have {wanted['bytes']}"
        if _digest(file) != wanted["sha256"]:
            return f"{folder.name} is damaged: {name} is not what was written (its SHA-256 differs)"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

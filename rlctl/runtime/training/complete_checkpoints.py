"""Checkpoints that are read: the complete ones of a run, for resuming, evaluation and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, NotFoundError
from rlctl.files import read_record
from rlctl.recipes.schema.trainer import Checkpoint
from rlctl.runtime.training.checkpoint_store import CONFIG, MANIFEST, CheckpointStore, digest
from rlctl.runtime.workers.background import PARTS


def latest_complete(store: CheckpointStore) -> tuple[int | None, list[str]]:
    """Return the latest step with an undamaged checkpoint, or None, and newer ones' damage."""
    damaged: list[str] = []
    for step, folder in reversed(store.folders().items()):
        problem = damage(folder)
        if problem is None:
            return step, damaged
        damaged.append(problem)
    return None, damaged


def policy_folder(store: CheckpointStore, step: int | None = None) -> Path:
    """Return the transformers folder of `step`, or of the latest checkpoint."""
    folder = checkpoint_of(store, step) / "huggingface"
    if not folder.is_dir():
        raise NotFoundError(
            f"{folder.parent.name} has no folder for transformers: trainer.checkpoint."
            "save_contents has no hf_model",
            where=str(folder.parent),
            hint="`rlctl export RUN DIR` writes it from the weights",
        )
    return folder


def saved_parts(checkpoint: Path) -> list[str]:
    """Return the parts of `trainer.checkpoint.save_contents` that a checkpoint has.

    Raises ConfigError if its manifest cannot be read.
    """
    try:
        return list(json.loads(read_record(checkpoint / MANIFEST)).get("contents", PARTS))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint.name} has no manifest", where=str(checkpoint)) from error


def check_contents(checkpoint: Path, wanted: Checkpoint) -> None:
    """Raise ConfigError if a checkpoint does not have what a resumed run loads."""
    saved = saved_parts(checkpoint)
    parts = {"model", *(part for part in wanted.load_contents if part == "optimizer")}
    for part in sorted(parts - set(saved)):
        hint = "trainer.checkpoint.load_contents=[model,extra] starts with a new one"
        if part == "model":
            hint = "start a new run with actor_rollout_ref.model.path=…/huggingface of it"
        raise ConfigError(
            f"{checkpoint.name} has no {part}: it has {', '.join(saved)}",
            where=str(checkpoint),
            hint=hint,
        )


def checkpoint_of(store: CheckpointStore, step: int | None = None) -> Path:
    """Return the folder of the checkpoint of `step`, or of the latest one."""
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        refuse_pruned(store, step)
        wanted = "no checkpoint"
        if step is not None:
            wanted = f"no checkpoint of step {step}"
        hint = (
            "train with trainer.save_freq=N: it saves every N steps and at the end; the default, "
            "-1, never saves"
        )
        if steps:
            hint = f"steps with a checkpoint: {', '.join(map(str, steps))}"
        raise NotFoundError(f"{wanted} in {store.folder}", hint=hint)
    return store.path(steps[-1] if step is None else step)


def refuse_pruned(store: CheckpointStore, step: int | None = None) -> None:
    """Raise NotFoundError if `rlctl runs prune` removed the checkpoint, or all if None."""
    from rlctl.runs.prune import pruned_steps

    pruned = pruned_steps(store.folder.parent)
    if pruned and step in (None, *pruned):
        gone, left = (", ".join(map(str, steps)) or "none" for steps in (pruned, store.steps()))
        raise NotFoundError(
            f"`rlctl runs prune` removed the checkpoints of steps {gone}",
            where=str(store.folder),
            hint=f"steps with a checkpoint: {left}; the record and the metrics are complete",
        )


def checkpoint_at(resume_from_path: str | None) -> Path:
    """Return the absolute folder of `trainer.resume_from_path`; its files are not checked.

    Raises ConfigError without a path, and NotFoundError if it has no checkpoint.
    """
    hint = "the folder of a checkpoint, such as …/step_000020"
    if resume_from_path is None:
        message = "trainer.resume_mode=resume_path needs trainer.resume_from_path"
        raise ConfigError(message, hint=hint)
    folder = Path(resume_from_path).expanduser().absolute()
    if not (folder / MANIFEST).is_file():
        message = f"there is no checkpoint in trainer.resume_from_path: {resume_from_path}"
        raise NotFoundError(message, hint=hint)
    return folder


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None.

    Every file of its manifest must exist with the size and SHA-256 listed there.
    """
    if not (folder / MANIFEST).exists():
        return f"{folder.name} is damaged: {MANIFEST} is missing"
    try:
        listing: dict[str, dict[str, Any]] = json.loads(read_record(folder / MANIFEST))["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{folder.name} is damaged: {MANIFEST} cannot be read ({type(error).__name__})"
    inside = folder.resolve()
    for name, wanted in listing.items():
        file = folder / name
        if not file.resolve().is_relative_to(inside):
            return f"{folder.name} is damaged: {name} is a link or a path to another folder"
        if not file.is_file():
            return f"{folder.name} is damaged: {name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            size = file.stat().st_size
            return f"{folder.name} is damaged: {name} has {size} bytes, not {wanted['bytes']}"
        if digest(file) != wanted["sha256"]:
            changed = f"{name} has changed since it was written (its SHA-256 differs)"
            return f"{folder.name} is damaged: {changed}"
    return None


def config_hash(folder: Path) -> str:
    """Return the SHA-256 of the configuration in the folder of a run or checkpoint."""
    return digest(folder / CONFIG)

"""Checkpoints: one folder a step, whole or not there.

A checkpoint is written into a folder beside its place, listed with sizes and hashes, flushed to the disk and renamed. It holds the
distributed state of actor and critic (`actor/`, `critic/`, independent of the number of ranks), the controller's state (`state.json`)
and the policy as transformers and vLLM load it (`huggingface/`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlctl.errors import NotFoundError
from rlctl.runtime.roles import Roles

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in `folder`."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, oldest first."""
        return sorted(int(path.parent.name.removeprefix("step_")) for path in self.folder.glob(f"step_*/{MANIFEST}"))

    def save(self, step: int, roles: Roles, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder. Nothing half-written ever carries the final name."""
        final = self.path(step)
        aside = final.with_name(f".{final.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "huggingface").mkdir(parents=True)
        roles.actor.save(aside / "actor")
        if roles.critic_role is not None:
            roles.critic.save(aside / "critic")
        roles.actor.export(aside / "huggingface")
        tokenizer.save_pretrained(aside / "huggingface")
        (aside / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        listing = {str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
        (aside / MANIFEST).write_text(json.dumps({"step": step, "files": listing}, indent=1))
        _flush([*files, aside / MANIFEST])
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        return final

    def policy(self, step: int | None = None) -> Path:
        """The transformers folder of `step`, or of the newest checkpoint."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            there = ", ".join(map(str, steps)) or "none"
            raise NotFoundError(f"no checkpoint {'' if step is None else f'of step {step} '}in {self.folder}", hint=f"steps there: {there}")
        return self.path(steps[-1] if step is None else step) / "huggingface"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

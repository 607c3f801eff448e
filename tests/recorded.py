"""Records of runs, written as training writes them, and commands in this process."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlctl.__main__ import main
from rlctl.cli.console import stdout
from rlctl.cli.stderr import stderr
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.checkpoint_store import CONFIG, CheckpointStore
from rlctl.runtime.training.stopping import restored_process
from rlctl.tracking.jsonl import JsonlTracker
from rlctl.tracking.tracker import RunInfo, Sample


def record(
    folder: Path,
    rows: Mapping[int, Mapping[str, float]],
    samples: Mapping[int, Sequence[Sample]] | None = None,
) -> None:
    """Write metrics and validation samples by step into the folder of a run."""
    tracker = JsonlTracker()
    tracker.start(RunInfo("id", "p", "r", folder, max(rows, default=1), {}))
    for step, metrics in rows.items():
        tracker.log(step, metrics)
    for step, answers in (samples or {}).items():
        tracker.generations(step, answers)
    tracker.finish("finished")


def exportable(root: Path) -> RunDir:
    """Return a run in `root` with a checkpoint whose policy is one small file."""
    run = RunDir.create(root, "p", "r", "ppo")
    run.write_config("trainer: {}\n", {})
    store = CheckpointStore(run.path / "checkpoints")
    aside = store.begin(1)
    (aside / "huggingface").mkdir()
    (aside / "huggingface" / "config.json").write_text("{}")
    (aside / CONFIG).write_text("trainer: {}\n")
    store.finish(1)
    return run


def watched(patch: pytest.MonkeyPatch, owner: type, method: str) -> list[tuple[Any, ...]]:
    """Return the list to which each call of a method adds its arguments, names and result."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((args, kwargs, result))
        return result

    patch.setattr(owner, method, call)
    return calls


def plain_environment(**changes: str) -> dict[str, str]:
    """Return the environment without variables of rlctl and of colours, with `changes`."""
    prefixes = ("RLCTL_", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | changes


def called(
    *words: str, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Call `rlctl` in this process, in the folder `cwd` and the environment of `changes`."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, plain_environment(**changes), clear=True),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
        restored_process(),
    ):
        for console in (stdout, stderr):
            console.cache_clear()
        code = main(words)
    for console in (stdout, stderr):
        console.cache_clear()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

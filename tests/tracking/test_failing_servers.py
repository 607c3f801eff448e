"""Every step and sample is on the server once after one `runs sync`, however the server failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlctl.tracking.jsonl import METRICS_FILE, read_metrics
from rlctl.tracking.threaded import first_missing_step
from tests.processes import run_python
from tests.tracking.failing_cases import NUM_STEPS, Case, row
from tests.tracking.faults import Switch
from tests.tracking.real import STEP, in_a_home
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

SAMPLES = "val/generations"
STEPS = range(1, NUM_STEPS + 1)
# Each case ends with `rlctl runs sync`.
pytestmark = pytest.mark.plugin("console")
EXPECTED = {step: set(row(step)) | ({SAMPLES} if step % 2 == 0 else set()) for step in STEPS}


def play(root: Path, seeds: Sequence[int], finish_s: float, at_once: int) -> dict[int, Any]:
    """Play cases against a server each; return how often each server has a step of a name."""
    with ExitStack() as stack:
        addresses, read = [], {}
        for seed in seeds:
            if Case.draw(seed).logger == "wandb":
                files: dict[str, bytes] = {}
                address, runs = stack.enter_context(wandb_server(Switch(), files))
                read[seed] = lambda runs=runs, files=files: wandb_content(runs, files)
            else:
                address, runs = stack.enter_context(swanlab_server(Switch()))
                read[seed] = lambda runs=runs: swanlab_content(runs)
            addresses.append([seed, address])
        given = json.dumps([str(root), addresses, finish_s, at_once])
        keys = {"WANDB_API_KEY": "k" * 40, "SWANLAB_API_KEY": "k" * 21}
        done = run_python(
            "-m", "tests.tracking.failing", given, cwd=root, env=in_a_home(root) | keys
        )
        assert done.returncode == 0, done.stderr
        return {seed: reader() for seed, reader in read.items()}


def wandb_content(runs: dict[str, Any], files: dict[str, bytes]) -> Counter[tuple[int, str]]:
    """Count the rows of the history by step and metric, and the tables that it names by step.

    W&B shows no table that the history does not name, and none whose artifact is incomplete.
    """
    found: Counter[tuple[int, str]] = Counter()
    for line in (line for lines in runs.values() for line in lines.values()):
        for name in line.keys() - {STEP, SAMPLES}:
            if not name.startswith("_"):
                found[int(line[STEP]), name] += 1
        shown = line.get(SAMPLES, {})
        artifact = shown.get("artifact_path", "//").split("/")[2]
        if shown.get("path") in files and f"committed/{artifact}" in files:
            table = json.loads(files[shown["path"]])
            place = table["columns"].index("step")
            for step in {each[place] for each in table["data"]}:
                found[step, SAMPLES] += 1
    return found


def swanlab_content(experiments: dict[str, Any]) -> Counter[tuple[int, str]]:
    """Count the points of curves, and the tables, by step and name."""
    found: Counter[tuple[int, str]] = Counter()
    for experiment in experiments.values():
        for name, points in experiment.curves.items():
            found.update((step, name) for step, _ in points)
        for name, steps in experiment.media.items():
            found.update((step, name) for step in steps)
    return found


def check(root: Path, seed: int, content: Counter[tuple[int, str]]) -> None:
    """Check that the server has everything once, and that nothing counts as missing."""
    run = root / "runs" / "house" / f"seed-{seed}"
    context = f"{Case.draw(seed)}\n{(run / 'log.txt').read_text()[-3000:]}"
    steps = [int(each["step"]) for each in read_metrics(run / METRICS_FILE)]
    expected = Counter({(step, name): 1 for step in steps for name in EXPECTED[step]})
    assert steps == [*STEPS][: len(steps)]
    assert len(steps) >= NUM_STEPS // 2
    assert content == expected, f"{content - expected} {expected - content} {context}"
    logger = Case.draw(seed).logger
    assert first_missing_step(run, logger, NUM_STEPS + 1) == NUM_STEPS + 1, context


def test_one_sync_completes_six_random_failures(tmp_path):
    seeds = [0, 1, 2, 3, 4, 5]
    for seed, content in play(tmp_path, seeds, finish_s=2.0, at_once=6).items():
        check(tmp_path, seed, content)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 160, 10))
def test_one_sync_completes_sixty_random_failures(tmp_path, first):
    seeds = range(first, first + 10)
    failed = []
    for seed, content in play(tmp_path, seeds, finish_s=4.0, at_once=4).items():
        try:
            check(tmp_path, seed, content)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)

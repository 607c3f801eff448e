"""Rollout engines in a pool of their own: their start, their loss, and refused pools."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlctl.__main__ import main
from tests.e2e.command import (
    metrics,
    reproducible,
    start,
    train,
    wait_for_steps,
    wait_until_gone,
    with_marker,
)
from tests.e2e.killed_runs import events
from tests.settings import given

SEPARATE = ["trainer.placement.rollout=engines", "trainer.placement.pools={engines: 2}"]

EAGER = (
    *("async_training.schedule=eager", "async_training.max_staleness=1"),
    "algorithm.rollout_correction.bypass_mode=true",
)


@pytest.mark.extra("vllm")
@pytest.mark.soak
@pytest.mark.parametrize("options", [(), EAGER])
def test_an_engine_on_two_devices_survives_the_loss_of_one(
    options: tuple[str, ...], settings: list[str], tmp_path: Path
) -> None:
    marker = f"{os.getpid()}-shared"
    overrides = [
        *(*settings, *SEPARATE, *given(steps=5, epochs=9, engine="vllm", n=2, tensor=2)),
        *options,
    ]
    run = tmp_path / "runs" / "quickstart" / "shared"
    process = start("train", "grpo", "--name", "shared", *overrides, cwd=tmp_path, marker=marker)
    wait_for_steps(process, run, 2)
    [engine] = json.loads((run / "attempts" / "1" / "engines.json").read_text())["engines"]
    assert engine["devices"] == {"CPU": 2.0}
    log = run / "attempts" / "1" / "engines-0-rank-1.log"
    [second] = [
        each
        for each in with_marker(marker)
        if each.pid != process.pid and log in [Path(file.path) for file in each.open_files()]
    ]
    second.kill()
    _, talk = process.communicate(timeout=900)
    assert process.returncode == 0, talk
    assert talk.count("is lost") == len(events(run, "engine_lost")) == 1
    assert len(events(run, "engine_restarted")) == 1
    rows = metrics(run)[1:]
    assert len(rows) == 5
    if EAGER[0] not in options:  # there an older policy generates
        assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    wait_until_gone(marker)


def test_the_transport_of_weights_changes_no_metric(settings: list[str], tmp_path: Path) -> None:
    rows: list[object] = []
    for backend in ("object_store", "gloo"):
        transport = f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"
        own = [*settings, *SEPARATE, transport, *given(steps=3, lr=1e-3, n=2)]
        rows.append(reproducible(train("grpo", backend, *own, cwd=tmp_path)))
    assert rows[0] == rows[1]


def test_invalid_engine_pools_are_refused(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["trainer.placement.rollout=x", "trainer.placement.critic=x"]
    assert main(["train", "ppo", *settings, *same]) == 3
    assert "pool 'x' holds the rollout engines and critic" in capsys.readouterr().err
    assert main(["train", "ppo", "--inline", *settings, *SEPARATE]) == 2
    assert "--inline runs one process" in capsys.readouterr().err


@pytest.mark.extra("vllm")
@pytest.mark.parametrize(("size", "where"), [(2, ""), (4, " on 2 nodes")])
def test_dry_run_shows_the_nodes_of_an_engine(
    settings: list[str], capsys: pytest.CaptureFixture[str], size: int, where: str
) -> None:
    wide = ["trainer.nnodes=2", "trainer.placement.pools={main: 1, engines: 2}"]
    rollout = "actor_rollout_ref.rollout"
    engines = [f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size={size}"]
    words = ["train", "grpo", "--dry-run", "--json", *settings, SEPARATE[0], *wide, *engines]
    assert main([*words, f"{rollout}.n=2"]) == 0
    planned = json.loads(capsys.readouterr().out)
    [engine] = [placed for placed in planned["placement"] if placed["role"] == "rollout"]
    assert engine["strategy"] == f"{4 // size} engines of {size} processes each{where}"


def test_dry_run_shows_the_engines(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "grpo", "--dry-run", "--json", *settings, *SEPARATE]
    assert main([*words, "actor_rollout_ref.rollout.n=2"]) == 0
    planned = json.loads(capsys.readouterr().out)
    rollout = next(each for each in planned["placement"] if each["role"] == "rollout")
    assert (rollout["pool"], rollout["processes"]) == ("engines", 2)
    memory = {each["role"]: each for each in planned["memory"]}
    assert memory["actor"]["engine"]["cache"] == 0
    # four of eight prompts, each with two responses: keys and values, layers, sizes
    assert memory["rollout"]["engine"]["cache"] == 2 * 2 * 16 * 4 * (160 + 2 * 12) * 4
    assert memory["rollout"]["parameters"] == 4 * memory["rollout"]["num_parameters"]

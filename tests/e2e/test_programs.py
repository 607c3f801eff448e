"""Agent programs in complete runs: on two Ray ranks, and after kill -9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.quiz import write_quiz
from tests.e2e.command import metrics, reproducible, rlctl
from tests.e2e.killed_runs import (
    LOGGER,
    TALKING,
    events,
    finish_despite,
    learned,
    responses,
    state,
)

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def program(settings: list[str], tmp_path: Path) -> list[str]:
    """Return settings of a run with a program, but for its name."""
    file = write_quiz(tmp_path, 6, num_problems=3)
    return [
        *settings,
        f"data.train_files={file}",
        "data.val_files=null",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "data.max_response_length=128",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.model.path=quickstart",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.agent.num_workers=1",
    ]


@pytest.mark.soak
@pytest.mark.slow
def test_two_ranks_learn_from_what_failed_episodes_leave(
    program: list[str], tmp_path: Path
) -> None:
    """Three of twelve episodes fail: the third mini-batch has one row for two ranks."""
    rlctl(
        *("train", "grpo", "--name", "ray", *program, f"{ROLLOUT}.n=4"),
        *("data.train_batch_size=3", "trainer.n_gpus_per_node=2"),
        "trainer.total_training_steps=1",
        *(f"{ROLLOUT}.agent.program=tests.agents.programs:fails_once",),
        f"{ROLLOUT}.agent.max_failed_share=0.5",
        cwd=tmp_path,
    )
    [row] = [each for each in metrics(tmp_path / "runs/quickstart/ray") if each["step"] == 1]
    assert row["agent/num_failed"] == 3
    assert row["agent/outcome/done"] == 0.75
    assert row["agent/retokenized_tokens"] == 0
    assert row["actor/grad_norm"] >= 0


@pytest.mark.slow
@pytest.mark.soak
def test_a_killed_run_repeats_its_programs(program: list[str], tmp_path: Path) -> None:
    command = [
        *("train", "grpo", "--inline", *program, f"{ROLLOUT}.n=2", LOGGER),
        *("trainer.total_training_steps=3", "trainer.save_freq=1"),
        f"{ROLLOUT}.agent.program=tests.agents.programs:chat",
        "trainer.rollout_data_dir=elsewhere",
        "--name",
    ]
    rlctl(*command, "straight", cwd=tmp_path)
    doing = finish_despite([f"24:{TALKING}"], "killed", [*command, "killed"], tmp_path, "--inline")
    assert doing[0].startswith("gen"), "killed while programs talk with the policy"
    straight, killed = (tmp_path / "runs/quickstart" / each for each in ("straight", "killed"))
    assert [each["number"] for each in events(killed, "attempt")] == [1, 2]
    assert reproducible(killed) == reproducible(straight)
    assert learned(killed) == learned(straight)
    assert responses(killed) == responses(straight)
    assert state(killed) == state(straight)

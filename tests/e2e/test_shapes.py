"""The quickstart with pictures: it resumes byte for byte, and learns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlctl.runs.thumbnails import read_thumbnail
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.e2e.command import metrics, reproducible, rlctl
from tests.e2e.killed_runs import learned, responses, state

SMALL = [
    "data.train_batch_size=8",
    "data.val_max_samples=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.num_threads=1",
]

VLLM = ("actor_rollout_ref.rollout.name=vllm",)
EXTRA = (pytest.mark.extra("vllm"), pytest.mark.soak)
ENGINES = [(), pytest.param(VLLM, marks=EXTRA)]


def two_steps(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the steps of a run of two, whose engine reports what the trainer computes."""
    rows = metrics(folder / "runs" / "quickstart" / name)
    steps = [row for row in rows if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert max(step["training/rollout_probs_diff_max"] for step in steps) <= 1e-4
    return steps


def test_a_run_with_images_resumes_byte_for_byte(tmp_path: Path) -> None:
    command = ("train", "grpo", "--recipe", "shapes", "--inline")
    rlctl(*command, "--name", "straight", *SMALL, cwd=tmp_path)
    straight = tmp_path / "runs" / "quickstart" / "straight"
    scores = [row.get("critic/score/mean") for row in metrics(straight)]
    assert len(set(scores)) > 2
    half = ("--name", "halved", *SMALL, "trainer.resume_mode=auto")
    rlctl(*command, *half, "trainer.total_training_steps=2", cwd=tmp_path)
    assert "halved resumes from step 2 of 4" in rlctl(*command, *half, cwd=tmp_path).stderr
    halved = straight.with_name("halved")
    assert reproducible(halved) == reproducible(straight)
    assert learned(halved) == learned(straight)
    assert state(halved) == state(straight)
    assert responses(halved) == responses(straight)
    samples = read_generations(generations_file(straight, 4))
    thumbnails = [read_thumbnail(straight, sample.images[0]) for sample in samples]
    assert len(set(thumbnails) - {None}) == len(samples) == 16
    assert "<image>" in samples[0].prompt
    export = straight / "checkpoints" / "step_000004" / "huggingface"
    assert {"preprocessor_config.json", "model.safetensors"} <= set(os.listdir(export))
    rlctl(
        *("train", "ppo", "--recipe", "shapes", "--inline", "--name", "critic", *SMALL),
        *("algorithm.adv_estimator=gae", f"actor_rollout_ref.model.path={export}"),
        *(f"critic.model.path={export}", "trainer.total_training_steps=1"),
        cwd=tmp_path,
    )
    (*_, last) = metrics(straight.with_name("critic"))
    assert last["critic/grad_norm"] > 0


@pytest.mark.extra("vllm")
def test_vllm_generates_what_the_trainer_scores(tmp_path: Path) -> None:
    command = ("train", "grpo", "--recipe", "shapes", "--inline", "--name", "vllm", *SMALL)
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=-1")
    rlctl(*command, *VLLM, *steps, cwd=tmp_path)
    two_steps(tmp_path, "vllm")


@pytest.mark.soak
@pytest.mark.extra("vllm")
def test_two_ranks_of_vllm_share_three_vision_heads(tmp_path: Path) -> None:
    rlctl(
        *("train", "grpo", "--recipe", "shapes", "--name", "two", *SMALL, *VLLM),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        *("trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.save_freq=-1"),
        cwd=tmp_path,
    )
    two_steps(tmp_path, "two")


@pytest.mark.parametrize("engine", ENGINES)
def test_replies_of_environments_have_pictures(engine: tuple[str, ...], tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    rlctl(
        *("train", "grpo", "--recipe", "shapes", "--inline", "--name", "episodes", *SMALL, *engine),
        *(f"{rollout}.multi_turn.enable=true", "data.max_response_length=48"),
        f"{rollout}.agent.environment=tests.agents.pictures:Pictures",
        *("trainer.total_training_steps=2", "trainer.save_freq=-1"),
        cwd=tmp_path,
    )
    steps = two_steps(tmp_path, "episodes")
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert steps[0]["agent/turns/mean"] > 1.5


@pytest.mark.soak
@pytest.mark.parametrize("engine", ENGINES)
def test_the_recipe_shapes_learns(engine: tuple[str, ...], tmp_path: Path) -> None:
    command = ("train", "grpo", "--recipe", "shapes", "--inline", "--name", "shapes")
    rlctl(*command, *engine, cwd=tmp_path)
    steps = metrics(tmp_path / "runs" / "quickstart" / "shapes")
    scores = [
        value
        for step in steps
        for name, value in step.items()
        if name.startswith("val-core/") and "mean@1" in name
    ]
    assert scores[-1] - scores[0] > 0.4
    assert max(step.get("training/rollout_probs_diff_max", 0.0) for step in steps) <= 1e-3

"""The quickstart with pictures: it resumes byte for byte, and learns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.thumbnails import read_thumbnail
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.e2e.command import metrics, reproducible, rlctl, train
from tests.e2e.killed_runs import learned, responses, state
from tests.settings import given

SHAPES = ("--recipe", "shapes")
SMALL = (
    *(*SHAPES, *given(batch=8, val_rows=16, mini_batch=4, n=4)),
    *given(steps=4, save=2, validate=2, threads=1),
)
TWO = given(steps=2, save=-1)

VLLM = (*given(engine="vllm"),)
EXTRA = (pytest.mark.extra("vllm"), pytest.mark.soak)
ENGINES = [(), pytest.param(VLLM, marks=EXTRA)]


def two_steps(*settings: str, cwd: Path) -> list[dict[str, Any]]:
    """Return the steps of a run of two, whose engine reports what the trainer computes."""
    rows = metrics(train("grpo", "two", *SMALL, *TWO, *settings, cwd=cwd))
    steps = [row for row in rows if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert max(step["training/rollout_probs_diff_max"] for step in steps) <= 1e-4
    return steps


def test_a_run_with_images_resumes_byte_for_byte(tmp_path: Path) -> None:
    straight = train("grpo", "straight", "--inline", *SMALL, cwd=tmp_path)
    scores = [row.get("critic/score/mean") for row in metrics(straight)]
    assert len(set(scores)) > 2
    half = ("--inline", *SMALL, "trainer.resume_mode=auto")
    halved = train("grpo", "halved", *half, *given(steps=2), cwd=tmp_path)
    done = rlctl("train", "grpo", "--name", "halved", *half, cwd=tmp_path)
    assert "halved resumes from step 2 of 4" in done.stderr
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
    critic = (f"critic.model.path={export}", "algorithm.adv_estimator=gae")
    own = (*SMALL, *critic, *given(model=export, steps=1))
    (*_, last) = metrics(train("ppo", "critic", "--inline", *own, cwd=tmp_path))
    assert last["critic/grad_norm"] > 0


@pytest.mark.extra("vllm")
def test_vllm_generates_what_the_trainer_scores(tmp_path: Path) -> None:
    two_steps("--inline", *VLLM, cwd=tmp_path)


@pytest.mark.soak
@pytest.mark.extra("vllm")
def test_two_ranks_of_vllm_share_three_vision_heads(tmp_path: Path) -> None:
    two_steps(*VLLM, *given(tensor=2, ranks=2), cwd=tmp_path)


@pytest.mark.plugin("agents")
@pytest.mark.parametrize("engine", ENGINES)
def test_replies_of_environments_have_pictures(engine: tuple[str, ...], tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    pictures = f"{rollout}.agent.environment=tests.plugins.agents.pictures:Pictures"
    own = (f"{rollout}.multi_turn.enable=true", pictures, *given(response=48))
    steps = two_steps("--inline", *engine, *own, cwd=tmp_path)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert steps[0]["agent/turns/mean"] > 1.5


@pytest.mark.soak
@pytest.mark.parametrize("engine", ENGINES)
def test_the_recipe_shapes_learns(engine: tuple[str, ...], tmp_path: Path) -> None:
    steps = metrics(train("grpo", "shapes", *SHAPES, "--inline", *engine, cwd=tmp_path))
    scores = [
        value
        for step in steps
        for name, value in step.items()
        if name.startswith("val-core/") and "mean@1" in name
    ]
    assert scores[-1] - scores[0] > 0.4
    assert max(step.get("training/rollout_probs_diff_max", 0.0) for step in steps) <= 1e-3

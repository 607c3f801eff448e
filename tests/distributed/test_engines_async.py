"""Separate vLLM pool with `rollout.mode=async`: the same responses as in sync mode.

The policy has LoRA adapters, which the engines compute.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.importance_weights import SampledTokens, mismatch
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.cluster.session import ray_session
from rlctl.tracking.metrics import to_floats
from tests.distributed.test_engines import MODEL, OVERRIDES, Stage, experience
from tests.models import write_tiny_model
from tests.warm_workers import warm_workers

pytestmark = [pytest.mark.extra("vllm"), pytest.mark.soak]

# Records its maximum number of concurrent prompts, of which the first three wait for each other
# while the file `wait` exists, and crashes if the file `die` exists.
ENGINE = """
import os, pathlib, signal, threading
from rlctl.runtime.rollout.vllm_engine.engine import VLLMEngine

FOLDER = pathlib.Path(__file__).parent

class Engine(VLLMEngine):
    in_flight = most = 0
    three = threading.Event()

    def generate(self, prompt_ids, sampling):
        self.in_flight += len(prompt_ids)
        if self.in_flight >= 3:
            self.three.set()
        if (FOLDER / "wait").exists():
            self.three.wait(60)
        self.most = max(self.most, self.in_flight)
        responses = super().generate(prompt_ids, sampling)
        try:
            (FOLDER / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        except FileNotFoundError:  # nobody asks for it, or the other engine was faster
            pass
        self.in_flight -= len(prompt_ids)
        (FOLDER / f"{os.getpid()}.most").write_text(str(self.most))
        return responses
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Stage]]:
    """Build two engines in async mode, and one in sync mode, each with six rows at a time."""
    folder = tmp_path_factory.mktemp("engines")
    write_tiny_model(folder / "model", hidden_size=128, head_dim=32)
    (folder / "failing_vllm.py").write_text(ENGINE)
    model = [
        *OVERRIDES,
        f"{MODEL}{folder}/model",
        "actor_rollout_ref.rollout.max_num_seqs=6",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=32",
        "actor_rollout_ref.rollout.lora_merge=false",
    ]
    whole = compose("grpo", [*model, "actor_rollout_ref.rollout.name=vllm"]).config
    single = compose(
        "grpo",
        [
            *model,
            "actor_rollout_ref.rollout.name=failing_vllm:Engine",
            "actor_rollout_ref.rollout.mode=async",
        ],
    ).config
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(folder))  # the trainer in this process reads what the engine takes
    with warm_workers(), ray_session(single.ray_kwargs.ray_init, 4, 1, 120.0):
        both = Stage(folder, single), Stage(folder, whole, num_engines=1)
        yield both
        for stage in both:
            stage.pool.close()
    sys.path.remove(str(folder))


def same(first: Rollouts, second: Rollouts) -> bool:
    """Compare tokens exactly and log-probs (≥ -20) up to rounding, which depends on the batch."""
    rows = zip(first.response_ids.rows(), second.response_ids.rows(), strict=True)
    if any(one.tolist() != other.tolist() for one, other in rows):
        return False
    return torch.allclose(
        first.rollout_log_probs.values, second.rollout_log_probs.values, rtol=0, atol=1e-4
    )


def test_async_mode_generates_the_responses_of_sync_mode(stages: tuple[Stage, Stage]) -> None:
    """Before and after an update, and after the loss of an engine with prompts in flight."""
    single, whole = stages
    (single.folder / "wait").touch()
    first = single.generate(seed=1)
    (single.folder / "wait").unlink()
    assert same(first, whole.generate(seed=1))
    assert {int(path.read_text()) for path in single.folder.glob("*.most")} == {
        3
    }  # prompts of three rows: two in generation, one queued
    log_probs = single.trainer.compute_log_probs(first).log_probs
    single.actor.update(experience(first, log_probs), lr=1e-2)
    after = single.generate(seed=1)
    trainer = single.trainer.compute_log_probs(after)
    sampled = SampledTokens.from_rollouts(after, trainer.log_probs.values)
    found = to_floats(mismatch(sampled))
    assert found["training/rollout_probs_diff_mean"] <= 1e-5
    assert found["training/rollout_probs_diff_max"] <= 1e-3
    assert not same(after, first)
    (single.folder / "die").touch()
    assert same(single.generate(seed=1), after)
    assert single.kinds()[0] == "engine_lost"
    assert single.events[0][1]["requests"] > 1

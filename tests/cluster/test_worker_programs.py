"""The programs of docs/examples/workers on one Ray session, with the shipped model."""

import runpy
from pathlib import Path

import pytest
import ray

from rlctl.workers import session
from tests.architecture.source import ROOT
from tests.warm_workers import warm_workers

EXAMPLES = ROOT / "docs" / "examples" / "workers"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with warm_workers(), session(num_cpus=3):
        yield


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.soak
def test_online_dpo_runs_as_a_ray_task():
    main_task = runpy.run_path(str(EXAMPLES / "online_dpo.py"))["main_task"]
    first, second = ray.get(main_task.remote(num_steps=2, batch_size=8))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are equal"
    assert 0 < first["score"] < 1
    assert second["loss"] != first["loss"]


@pytest.mark.slow
def test_ppo_runs_with_critic_and_reward_model(tmp_path: Path):
    main_task = runpy.run_path(str(EXAMPLES / "ppo.py"))["main_task"]
    settings = [f"trainer.run_dir={tmp_path}", "data.train_batch_size=4", "data.val_files=null"]
    settings += ["data.train_max_samples=8", "data.max_response_length=16"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
    first, second = main_task(2, settings=settings)
    assert first["actor/grad_norm"] > 0
    assert first["critic/vf_loss"] != second["critic/vf_loss"]
    assert first["score"] != 0

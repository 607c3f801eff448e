"""Two nodes of a real Ray cluster, both on this machine: a training run spreads over them, and trials of a sweep land on both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from tests.e2e.command import metrics, rlctl
from tests.models import write_tiny_model


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with one CPU each."""
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes(timeout=60)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, address: str) -> list[str]:
    shelf = tmp_path_factory.mktemp("shelf")
    write_tiny_model(shelf / "model")
    train, val = train_and_validation(32, 4, seed=1, level=1, careless=0.0)
    write_rows(shelf / "train.parquet", train)
    write_rows(shelf / "val.parquet", val)
    return [
        f"data.train_files={shelf}/train.parquet",
        f"data.val_files={shelf}/val.parquet",
        f"actor_rollout_ref.model.path={shelf}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "data.max_prompt_length=160",
        "data.max_response_length=8",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.val_before_train=false",
        "trainer.project_name=two",
        "trainer.num_threads=1",
        f"ray_kwargs.ray_init.address={address}",
    ]


def nodes(run: Path) -> set[str]:
    """The nodes on which a run's processes stood, as its event log says."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {node for event in events if event["kind"] == "placed" for node in event["main"]}


@pytest.mark.slow
def test_a_run_spreads_over_both_nodes(settings: list[str], tmp_path: Path) -> None:
    rlctl("train", "sft", *settings, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "--name", "wide", cwd=tmp_path)
    run = tmp_path / "runs" / "two" / "wide"
    assert len(nodes(run)) == 2
    assert metrics(run)[-1]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_trials_land_on_both_nodes(settings: list[str], tmp_path: Path) -> None:
    axis = "actor_rollout_ref.actor.optim.lr=1e-4,1e-3"
    done = rlctl("sweep", "grpo", *settings, axis, "--metric", "actor/lr", "--name", "spread", cwd=tmp_path)
    assert "2 at once" in done.stderr
    first, second = (nodes(tmp_path / "runs" / "two" / f"spread-00{number}") for number in range(2))
    assert len(first | second) == 2

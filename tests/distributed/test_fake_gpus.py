"""Placement on a Ray cluster of four nodes with eight GPUs each, which only Ray counts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.gpus import ClusterGpus, cluster_gpus
from rlctl.runtime.cluster.pool import PoolSpec, nodes_of, process_options, reserve
from rlctl.runtime.rank_info import RankInfo

NODES, GPUS = 4, 8

pytestmark = [pytest.mark.soak, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    node = {
        **{"num_cpus": 16, "num_gpus": GPUS, "object_store_memory": 100_000_000},
        "resources": {"accelerator_type:H100": 1},
    }
    made = Cluster(
        initialize_head=True, connect=False, head_node_args=node | {"include_dashboard": False}
    )
    for _ in range(NODES - 1):
        made.add_node(**node)
    made.wait_for_nodes(timeout=600)
    ray.init(made.address, logging_level="ERROR")
    yield made.address
    ray.shutdown()
    made.shutdown()


@ray.remote
class Rank:
    """Process of a pool that tells its node and its GPU."""

    def place(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


def spec(name: str, per_node: int) -> PoolSpec:
    size = per_node * NODES
    rank_info = RankInfo(0, size, "cuda", 1, 60.0, False, None)
    return PoolSpec(name, size, rank_info, 60.0, 60.0, False, 1.0, (per_node,) * NODES)


def test_a_driver_without_a_gpu_finds_those_of_the_cluster(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = compose("ppo", ["ray_kwargs.ray_init.address=10.0.0.1:6379"]).config
    assert cluster_gpus(config) == ClusterGpus(GPUS, "H100")  # of the session that is open
    here = compose("ppo", ["ray_kwargs.ray_init.address=127.0.0.1:6379"]).config
    assert cluster_gpus(here) is None


def test_pools_have_adjacent_ranks_on_each_node_and_a_gpu_each(cluster: str) -> None:
    trainers, engines = spec("main", 2), spec("engines", 6)
    groups = [reserve(each) for each in (trainers, engines)]
    for group in groups:
        assert len(set(nodes_of(group))) == NODES
    options = [
        process_options(trainers, groups[0], rank, trainers.bundle_of(rank))
        for rank in range(trainers.num_processes)
    ]
    ranks = [Rank.options(**each).remote() for each in options]
    places = ray.get([rank.place.remote() for rank in ranks], timeout=600)
    nodes = [node for node, _ in places]
    assert nodes == sorted(nodes, key=nodes.index), "ranks of a node are adjacent"
    assert set(Counter(nodes).values()) == {2}
    assert len(set(places)) == trainers.num_processes, "no GPU has two ranks"

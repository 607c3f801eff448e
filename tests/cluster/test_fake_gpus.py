"""Processes on GPUs that only Ray counts, on four nodes with eight each.

tests/runtime/test_gpu_starts.py starts one in the process of the tests.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster.gpus import ClusterGpus, cluster_gpus
from rlctl.runtime.cluster.pool import PoolSpec, nodes_of, process_options, reserve
from rlctl.runtime.model.device_mesh import mesh_of

NODES, GPUS, PER_NODE = 4, 8, 4

pytestmark = pytest.mark.soak


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


@pytest.fixture(scope="module")
def places(cluster: str) -> list[tuple[str, str]]:
    """Return the node and the GPU of each rank of a pool, beside which there is another one."""
    trainers, engines = spec("main", PER_NODE), spec("engines", PER_NODE)
    groups = [reserve(pool) for pool in (trainers, engines)]
    for group in groups:
        assert len(set(nodes_of(group))) == NODES
    options = [
        process_options(trainers, groups[0], rank, trainers.bundle_of(rank))
        for rank in range(trainers.num_processes)
    ]
    ranks = [Rank.options(**given).remote() for given in options]
    return ray.get([rank.place.remote() for rank in ranks], timeout=600)


def test_pools_have_adjacent_ranks_on_each_node_and_a_gpu_each(
    places: list[tuple[str, str]],
) -> None:
    nodes = [node for node, _ in places]
    assert nodes == sorted(nodes, key=nodes.index), "ranks of a node are adjacent"
    assert set(Counter(nodes).values()) == {PER_NODE}
    assert len(set(places)) == len(places), "no GPU has two ranks"


@pytest.mark.parametrize(
    ("key", "dimension"),
    [("tensor_model_parallel_size", "tensor"), ("fsdp_size", "shard")],
)
@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_ranks_are_on_one_node(
    places: list[tuple[str, str]], key: str, dimension: str, size: int
) -> None:
    fsdp = compose("ppo", [f"actor_rollout_ref.actor.fsdp_config.{key}={size}"]).config
    ranks = RankInfo(0, len(places), "cpu", 1, 60.0, False, None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=len(places))
    try:
        mesh = mesh_of(ranks, fsdp.actor_rollout_ref.actor.fsdp_config)
        index = (mesh.mesh_dim_names or ()).index(dimension)
        groups = mesh.mesh.movedim(index, -1).reshape(-1, size).tolist()
    finally:
        dist.destroy_process_group()
    assert [len({places[rank][0] for rank in group}) for group in groups] == [1] * len(groups)

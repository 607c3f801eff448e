"""GPUs of a Ray cluster, for a driver on a machine that has none."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache

import torch

from rlctl.recipes import schema
from rlctl.runtime.cluster.address import address_of
from rlctl.runtime.cluster.nvidia import visible_gpus
from rlctl.runtime.cluster.ray_access import is_loopback

_TYPE = "accelerator_type:"  # prefix of the resource with which Ray names a node's GPUs


@dataclass(frozen=True)
class NodeGpus:
    """Build of torch on a node, and the node's GPUs as `visible_gpus` returns them."""

    address: str
    torch: str
    cuda: str | None  # that torch is built for
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class ClusterGpus:
    """GPUs of each node of a cluster that has GPUs."""

    per_node: int  # of the node with the fewest
    name: str | None  # as Ray names them, such as H100; None: unknown, or not the same everywhere
    nodes: tuple[NodeGpus, ...] = ()  # those that named theirs

    @property
    def has_bf16(self) -> bool:
        """False if a GPU has no bfloat16, which needs capability 8.0."""
        found = (re.search(r" MiB, ([\d.]+)", gpu) for node in self.nodes for gpu in node.gpus)
        return all(float(capability[1]) >= 8 for capability in found if capability)

    @property
    def memory(self) -> int | None:
        """Bytes of the smallest GPU; None if they are unknown."""
        sizes = (re.search(r", (\d+) MiB,", gpu) for node in self.nodes for gpu in node.gpus)
        return min((int(size[1]) * 2**20 for size in sizes if size), default=None)


def cluster_gpus(config: schema.Config) -> ClusterGpus | None:
    """Return the GPUs of the cluster that a run connects to.

    Each of its nodes is asked for name, memory and driver. None if the run needs no GPU, if the
    cluster has none, and if it is on this machine or this machine has GPUs, because torch then
    knows them. Raises the errors of `ray_session`.
    """
    init = config.ray_kwargs.ray_init
    trainer = config.trainer
    address = address_of(init)
    elsewhere = address is not None and not is_loopback(address)
    if not elsewhere or trainer.device == "cpu" or torch.cuda.is_available():
        return None
    import ray

    from rlctl.runtime.cluster.session import ray_session

    session = ray_session(init, 1, 1, trainer.timeouts.ray_start_s)
    with nullcontext() if ray.is_initialized() else session:
        alive = [node for node in ray.nodes() if node["Alive"]]
        with_gpus = [node for node in alive if node["Resources"].get("GPU", 0) >= 1]
        places = tuple((node["NodeID"], node["NodeManagerAddress"]) for node in with_gpus)
        nodes = _ask(places, trainer.timeouts.ray_start_s)
    if not with_gpus:
        return None
    resources = [node["Resources"] for node in with_gpus]
    names = {name for node in resources for name in node if name.startswith(_TYPE)}
    return ClusterGpus(
        int(min(node["GPU"] for node in resources)),
        names.pop().removeprefix(_TYPE) if len(names) == 1 else None,
        nodes,
    )


@cache
def _ask(places: tuple[tuple[str, str], ...], timeout_s: float) -> tuple[NodeGpus, ...]:
    """Return the GPUs of each node that names them within `timeout_s`; other runs may use them.

    `places` are ids and addresses of nodes, which are asked once.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    examine = ray.remote(num_cpus=0, max_retries=0)(own_gpus)
    tasks = [
        examine.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(address)
        for node, address in places
    ]
    ready = ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s)[0] if tasks else []
    found: list[NodeGpus] = []
    for task in ready:
        with suppress(RayError):  # such as an environment that cannot be built
            found.append(ray.get(task))
    return tuple(node for node in found if node.gpus)


def own_gpus(address: str) -> NodeGpus:
    """Return the GPUs of this machine, which has this address."""
    return NodeGpus(address, torch.__version__, torch.version.cuda, tuple(visible_gpus()))

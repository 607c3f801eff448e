"""GPUs of a Ray cluster, for a driver on a machine that has none."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from rlctl.recipes import schema
from rlctl.runtime.cluster.access import address_of, is_loopback

_TYPE = "accelerator_type:"  # prefix of the resource with which Ray names a node's GPUs


@dataclass(frozen=True)
class ClusterGpus:
    """GPUs of each node of a cluster that has GPUs."""

    per_node: int  # of the node with the fewest
    name: str | None  # as Ray names them, such as H100; None: unknown, or not the same everywhere


def cluster_gpus(config: schema.Config) -> ClusterGpus | None:
    """Return the GPUs of the cluster that a run connects to.

    None if the run needs none, if it has no GPU, and if it is on this machine or this machine has
    GPUs, because torch then knows them. Raises the errors of `ray_session`.
    """
    init, trainer = config.ray_kwargs.ray_init, config.trainer
    address = address_of(init)
    elsewhere = address is not None and not is_loopback(address)
    if not elsewhere or trainer.device == "cpu" or torch.cuda.is_available():
        return None
    import ray

    from rlctl.runtime.cluster.session import ray_session

    session = ray_session(init, 1, 1, trainer.timeouts.ray_start_s, None)
    with nullcontext() if ray.is_initialized() else session:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    with_gpus = [resources for resources in nodes if resources.get("GPU", 0) >= 1]
    if not with_gpus:
        return None
    names = {name for each in with_gpus for name in each if name.startswith(_TYPE)}
    return ClusterGpus(
        int(min(resources["GPU"] for resources in with_gpus)),
        names.pop().removeprefix(_TYPE) if len(names) == 1 else None,
    )

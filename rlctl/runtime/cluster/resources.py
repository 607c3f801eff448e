"""Total and free devices of a Ray cluster. Requires a session (`ray_session`)."""

from __future__ import annotations

from collections.abc import Mapping

import ray

Resources = Mapping[str, float]  # amounts of "CPU" and "GPU"


def total() -> dict[str, float]:
    """Return the devices of all nodes, reserved or not."""
    return _devices(ray.cluster_resources())


def free() -> dict[str, float]:
    """Return the devices that are not reserved at this moment."""
    return _devices(ray.available_resources())


def free_of(share: Mapping[str, float]) -> dict[str, float]:
    """Return what is free of everything that a process with this `share` reserves."""
    return {name: left for name, left in ray.available_resources().items() if name in share}


def address() -> str:
    """Return the address at which other processes can connect to this cluster."""
    return ray.get_runtime_context().gcs_address


def exceeds(need: Resources, available: Resources) -> bool:
    """Return True if `need` is larger than `available` in any device."""
    return any(amount > available.get(name, 0.0) + 1e-6 for name, amount in need.items())


def _devices(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


def node_here(num_processes: int, share: Mapping[str, float]) -> dict[str, float]:
    """Return the resource that only this machine's node has, if there are others to choose from.

    Empty if the node lacks the devices for processes with a `share` each.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1:
        return {}
    for node in nodes:
        has = node["Resources"]
        enough = all(has.get(name, 0) >= num_processes * part for name, part in share.items())
        if enough and node["NodeID"] == ray.get_runtime_context().get_node_id():
            return {f"node:{node['NodeManagerAddress']}": 0.001}
    return {}

"""What a Ray cluster has, and what of it is free. Needs a session (`ray_session`)."""

from __future__ import annotations

from collections.abc import Mapping

import ray

Resources = Mapping[str, float]  # of "CPU" and "GPU"


def total() -> dict[str, float]:
    """What all nodes have together, taken or not."""
    return _devices(ray.cluster_resources())


def free() -> dict[str, float]:
    """What nobody has reserved at this moment."""
    return _devices(ray.available_resources())


def address() -> str:
    """Where other processes reach this cluster."""
    return ray.get_runtime_context().gcs_address


def exceeds(need: Resources, there: Resources) -> bool:
    """Whether `need` is more than `there` is."""
    return any(amount > there.get(name, 0.0) + 1e-6 for name, amount in need.items())


def format_resources(resources: Resources) -> str:
    """`2 CPU, 1 GPU`."""
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "nothing"
    )


def _devices(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}

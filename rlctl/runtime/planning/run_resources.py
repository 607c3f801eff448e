"""Resources that the processes of a run take of a Ray cluster, before it starts."""

from __future__ import annotations

from collections import defaultdict

from rlctl.cores import process_resources
from rlctl.recipes import schema
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster.gpus import cluster_gpus
from rlctl.runtime.planning.devices import Devices, pool_device, pool_sizes


def run_resources(config: schema.Config) -> dict[str, float]:
    """Return the Ray resources of one run: the sum of those of its processes."""
    devices = Devices.from_config(config.trainer, cluster_gpus(config))
    needs = load_algorithm(config, 1).needs
    total: dict[str, float] = defaultdict(float)
    for pool, size in pool_sizes(config, devices, needs).items():
        device = pool_device(config, devices, needs, pool)
        one = process_resources(device, config.trainer.placement.device_fraction)
        for name, amount in one.items():
            total[name] += size * amount
    return dict(total)


def num_processes(config: schema.Config) -> int:
    """Return the number of worker processes of one run."""
    sizes = pool_sizes(
        config,
        Devices.from_config(config.trainer, cluster_gpus(config)),
        load_algorithm(config, 1).needs,
    )
    return sum(sizes.values())

"""Placement of a sweep's runs: the resources of a run, and what the Ray cluster has free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rlctl.cores import default_threads, process_resources
from rlctl.errors import ResourceError
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster.gpus import cluster_gpus
from rlctl.runtime.planning.devices import Devices, pool_device, pool_sizes
from rlctl.sweeps.sweep_record import SweepRecord, Trial
from rlctl.text import format_resources, plural


class RayCluster:
    """Cluster of the Ray session of this process."""

    def __init__(self, record: SweepRecord, config: schema.Config) -> None:
        from rlctl.runtime.cluster import resources

        self.resources = resources
        self.record = record
        self.config = config
        self.threads: int | None = None

    def split_cores(self, settings: schema.Sweep) -> str:
        """Share the CPU cores among the processes of parallel runs, and return a summary line."""
        first = run_resources(self.config)
        total = self.resources.total()
        capacity = max(
            1, min(int(total[name] / amount + 1e-6) for name, amount in first.items() if amount)
        )
        parallel = min(
            capacity, settings.parallel or capacity, settings.seeds * (settings.trials or capacity)
        )
        processes = parallel * num_processes(self.config)
        self.threads = self.config.trainer.num_threads or default_threads(processes)
        return (
            f"cluster: {format_resources(total)}; a run takes {format_resources(first)}: "
            f"{parallel} at once, {plural(self.threads, 'CPU thread')} a process"
        )

    def need(self, trial: Trial) -> Mapping[str, float]:
        """Return the resources of one run of a trial.

        Raises ConfigError if its configuration cannot be composed, and ResourceError if it needs
        more than the cluster has in total.
        """
        config = compose(self.record.recipe, [*self.record.fixed, *trial.overrides]).config
        need = run_resources(config)
        total = self.resources.total()
        if self.resources.exceeds(need, total):
            raise ResourceError(
                f"trial {trial.number} needs {format_resources(need)}; "
                f"the whole cluster has {format_resources(total)}",
                where=" ".join(trial.overrides),
                hint="use a larger cluster, fewer trainer.n_gpus_per_node, "
                "or a smaller trainer.placement.device_fraction",
            )
        return need

    def shortage(self, need: Mapping[str, float], pending: list[Mapping[str, float]]) -> str | None:
        """Return None if `need` fits, otherwise a phrase that names the free resources.

        `pending` are the needs of runs that have started but not reserved their resources.
        """
        free = {
            name: amount - sum(other.get(name, 0.0) for other in pending)
            for name, amount in self.resources.free().items()
        }
        if not self.resources.exceeds(need, free):
            return None
        return f"needs {format_resources(need)}, free {format_resources(free)}"

    def overrides(self) -> list[str]:
        """Return the overrides that a run on this cluster needs: the threads per process."""
        return [f"trainer.num_threads={self.threads}"]

    def environment(self) -> dict[str, str]:
        """Return the variables that place a run on this cluster; its record does not have them."""
        return {"RAY_ADDRESS": self.resources.address()}


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

"""Placement of a sweep's runs: the resources of a run, and what the Ray cluster has free."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.cores import default_threads
from rlctl.errors import ResourceError
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.planning.run_resources import num_processes, run_resources
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

"""Profiles of chosen steps: a trace of each chosen rank of the pools, in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlctl.errors import ConfigError
from rlctl.files import step_name
from rlctl.log import warn_once
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.cluster.pools import Pool, Pools

FOLDER = "profiles"


class StepProfiler:
    """Traces the steps `trainer.profile.steps`; a trace is `profiles/step_N/POOL-RANK.json`."""

    def __init__(
        self, config: schema.Profile, pools: Pools, run: RunDir, on_phase: Callable[[str], None]
    ) -> None:
        self.config = config
        self.run = run
        self.on_phase = on_phase
        # With --inline, all names are one pool.
        self.pools: dict[str, Pool] = {}
        for name, pool in pools.workers.items():
            if pool not in self.pools.values():
                self.pools[name] = pool

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the block if `step` was chosen. A failed step leaves no trace."""
        if step not in (self.config.steps or ()):
            yield
            return
        from rlctl.runtime.workers.trace import TraceSpec

        config = self.config
        ranks = self.config.ranks
        spec = TraceSpec(config.with_stack, config.with_memory, config.record_shapes)
        for pool in self.pools.values():
            pool.start_trace(spec, ranks)
        yield
        self.on_phase("writing profiles")
        run = self.run.path.absolute()
        folder = run / FOLDER / step_name(step)
        files = [
            str(file.relative_to(run))
            for name, pool in self.pools.items()
            for file in pool.write_trace(folder / name, ranks)
        ]
        self.run.event("profile", step=step, files=files)


def check_profile(config: schema.Profile, pool_sizes: Mapping[str, int], num_steps: int) -> None:
    """Raise ConfigError for ranks that no pool has; warn of steps after the last one."""
    most = max(pool_sizes.values())
    missing = [rank for rank in config.ranks or () if rank >= most]
    if config.steps and missing:
        raise ConfigError(
            f"no pool has rank {missing[0]}: the largest has {most} "
            f"process{'es' if most > 1 else ''}",
            where="trainer.profile.ranks",
            hint="ranks count from 0 in each pool; null = all",
        )
    late = [step for step in config.steps or () if step > num_steps]
    if late:
        warn_once(
            f"trainer.profile.steps: step {late[0]} has no profile, the run has {num_steps} steps"
        )

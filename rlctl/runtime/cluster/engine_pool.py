"""Pool of rollout engines, which may join and leave while a run uses them."""

from __future__ import annotations

from rlctl.runtime.cluster.engine_group import EngineGroup
from rlctl.runtime.cluster.engines import EngineProcesses
from rlctl.runtime.cluster.membership import Membership
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event


class EnginePool:
    """Pool of rollout engines, one per device."""

    def __init__(self, spec: PoolSpec, restart_timeout_s: float, event: Event) -> None:
        self.name = spec.name
        self.engines = EngineProcesses(spec, restart_timeout_s)
        self.event = event
        self._membership: Membership | None = None

    def spawn(self, spec: RolloutSpec) -> EngineGroup:
        """Start an engine in every process, asynchronously; `EngineGroup.wait` waits for them.

        From then on, engines are added and drained by requests in the folder of the log.
        """
        group, log = (
            EngineGroup(self.engines, spec, self.event),
            self.engines.spec.rank_info.log_path,
        )
        if log is not None:
            self._membership = Membership(self.engines, spec, log.parent, self.event)
        return group

    def end_changes(self) -> None:
        """Take no more requests to change the number of engines."""
        if self._membership is not None:
            self._membership.close()
            self._membership = None

    @property
    def nodes(self) -> list[str]:
        """The machine of each engine."""
        return [engine.node for engine in self.engines.engines]

    def close(self) -> None:
        """Kill the engines and release their devices."""
        self.end_changes()
        self.engines.close()

"""Use of the other machines of a Ray cluster: one small actor on each, without devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlctl.runtime.cluster.system import Machine, Sample, sample_machine

_ANSWER_S = 2.0


class Probe:
    """Process on a machine that samples its use."""

    def sample(self) -> Sample:
        """Return the machine's use since the last call."""
        return sample_machine()


@contextmanager
def other_machines(addresses: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """Yield the machine at each of `addresses`, but for this one; their actors end at the end."""
    here = ray.get_runtime_context().get_node_id()
    nodes = {
        node["NodeManagerAddress"]: node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != here and node["NodeManagerAddress"] in addresses
    }
    start: Any = ray.remote(num_cpus=0, max_restarts=-1)(Probe)
    probes = {
        address: start.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[address], soft=False)
        ).remote()
        for address in sorted(nodes)
    }
    try:
        yield {address: _Remote(probe) for address, probe in probes.items()}
    finally:
        for probe in probes.values():
            ray.kill(probe)


class _Remote:
    """Machine whose probe is asked; an answer that is late, as at its start, comes next time."""

    def __init__(self, probe: Any) -> None:
        self.probe = probe
        self.pending: Any = None

    def __call__(self) -> Sample:
        asked = self.pending
        if asked is None:
            asked = self.probe.sample.remote()
        ready, _ = ray.wait([asked], timeout=_ANSWER_S)
        if not ready:
            self.pending = asked
            return {}
        self.pending = None
        return ray.get(asked)

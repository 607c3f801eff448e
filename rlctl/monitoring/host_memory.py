"""Resident host memory of a run's processes on the controller's machine."""

from __future__ import annotations

from contextlib import suppress

import psutil

from rlctl.monitoring.rules import MEMORY

_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")  # Ray's own


def process_memory() -> dict[str, float]:
    """Return the GiB of the controller, and of the largest worker of each name.

    `Process` is that of roles on Ray, `sandbox` that of rewards and environments.
    """
    own = psutil.Process()
    found = {f"{MEMORY}controller": own.memory_info().rss / 2**30}
    for child in own.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            title = " ".join(child.cmdline()[:1])
            name = "sandbox" if "python" in title else title.removeprefix("ray::").split(".")[0]
            if name != "sandbox" and (name in _RAY or not title.startswith("ray::")):
                continue
            gib = child.memory_info().rss / 2**30
            found[f"{MEMORY}{name}"] = max(found.get(f"{MEMORY}{name}", 0.0), gib)
    return found

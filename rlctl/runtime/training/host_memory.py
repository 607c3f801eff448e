"""Resident host memory of a run's processes on the controller's machine."""

from __future__ import annotations

from contextlib import suppress

import psutil

from rlctl.tracking.alarm_rules import MEMORY

_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")  # processes of Ray itself


def process_memory() -> dict[str, float]:
    """Return the GiB of the controller, and of the largest worker of each name.

    `Process` is that of roles on Ray, `sandbox` that of rewards and environments.
    """
    controller = psutil.Process()
    found = {f"{MEMORY}controller": controller.memory_info().rss / 2**30}
    for child in controller.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            title = " ".join(child.cmdline()[:1])
            name = title.removeprefix("ray::").split(".")[0]
            if "python" in title:
                name = "sandbox"
            elif name in _RAY or not title.startswith("ray::"):
                continue
            gib = child.memory_info().rss / 2**30
            found[f"{MEMORY}{name}"] = max(found.get(f"{MEMORY}{name}", 0.0), gib)
    return found

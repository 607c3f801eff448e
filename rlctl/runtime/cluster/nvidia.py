"""NVIDIA GPUs of this machine as the driver reports them, also if torch cannot use them."""

from __future__ import annotations

import shutil
import subprocess

_TIMEOUT_S = 45  # nvidia-smi first initializes GPUs that no process uses


def visible_gpus() -> list[str]:
    """Return name, memory, capability and driver of each GPU; empty without a working driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = "name,memory.total,compute_cap,driver_version"
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]

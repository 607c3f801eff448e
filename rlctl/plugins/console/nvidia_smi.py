"""Queries of NVIDIA's driver by its command."""

from __future__ import annotations

import csv
import shutil
import subprocess

_TIMEOUT_S = 45.0  # the command first initializes GPUs that no process uses


def query(what: str, timeout_s: float = _TIMEOUT_S) -> list[list[str]]:
    """Return the rows of a query such as `gpu=index,uuid`; none without a working driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-{what}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]

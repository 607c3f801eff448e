"""Use of machines over time: CPU, memory and NVIDIA GPUs, sampled in a thread."""

from __future__ import annotations

import csv
import logging
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Self

import psutil

log = logging.getLogger(__name__)

Sample = dict[str, float]
Machine = Callable[[], Sample]

_GPU_FIELDS = {
    "utilization.gpu": "utilization_percent",
    "memory.used": "memory_gib",
    "memory.total": "memory_total_gib",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}
_SMI_S = 10.0
_FIRST_S = 1.0  # after the start: the use of the CPU needs two points in time


def sample_machine() -> Sample:
    """Return the use of this machine by all programs: numbers by name, without any text.

    The share of the CPU is that since the last call in this process.
    """
    memory = psutil.virtual_memory()
    return {
        "cpu_percent": psutil.cpu_percent(),
        "memory_gib": (memory.total - memory.available) / 2**30,
        "memory_percent": memory.percent,
        **sample_gpus(),
    }


def sample_gpus() -> Sample:
    """Return the use of each NVIDIA GPU, as far as NVML answers; empty without NVIDIA's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = f"--query-gpu=index,{','.join(_GPU_FIELDS)}"
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: Sample = {}
    for index, *cells in csv.reader(done.stdout.splitlines()):
        for name, cell in zip(_GPU_FIELDS.values(), cells, strict=False):
            try:
                value = float(cell)
            except ValueError:  # "[N/A]"
                continue
            if name.endswith("gib"):
                value /= 1024
            found[f"gpu{index.strip()}/{name}"] = value
    return found


class Sampler:
    """Samples of `machines` every `seconds`, from `with` on; the first is the controller's.

    A machine that fails is left out of the sample, with one warning.
    """

    def __init__(self, seconds: float, machines: Sequence[Machine]) -> None:
        self.seconds = seconds
        self.machines = machines
        self._sums: dict[str, tuple[float, int]] = {}
        self._failed: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # without a wait: a machine may not answer

    def read(self) -> Sample:
        """Return the mean of each number since the last call, as `system/node<i>/<name>`."""
        with self._lock:
            sums = self._sums
            self._sums = {}
        return {name: total / count for name, (total, count) in sums.items()}

    def _run(self) -> None:
        psutil.cpu_percent()
        wait = min(self.seconds, _FIRST_S)
        while not self._ended.wait(wait):
            wait = self.seconds
            for index, machine in enumerate(self.machines):
                self._add(index, machine)

    def _add(self, index: int, machine: Machine) -> None:
        try:
            sample = machine()
        except Exception as error:  # these numbers must not disturb a run
            if index not in self._failed and not self._ended.is_set():
                log.warning("no system metrics of node%d: %s", index, error)
            self._failed.add(index)
            return
        with self._lock:
            for name, value in sample.items():
                total, count = self._sums.get(f"system/node{index}/{name}", (0.0, 0))
                self._sums[f"system/node{index}/{name}"] = total + value, count + 1

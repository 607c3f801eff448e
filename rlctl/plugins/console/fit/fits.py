"""Meshes that `rlctl fit` searches, its results, and the trial of one.

A trial (`--try`) is one real step and the memory that it takes. The weights are random, so that
nothing is downloaded and responses reach their longest length.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlctl.errors import ResourceError, RlctlError
from rlctl.process import start_rlctl
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Mesh:
    """Nodes, devices of each, and ranks that share one copy of the parameters (-1: all)."""

    nodes: int
    per_node: int
    fsdp_size: int = -1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Fit:
    """Settings for one mesh; `rows` of the longest length are in a micro-batch, 0: none fit."""

    mesh: Mesh
    savings: str
    rows: int
    tokens: int
    peak: int  # bytes on the fullest device
    overrides: list[str] = field(default_factory=list)
    reason: str = ""  # why nothing fits
    settings: Mapping[str, Any] = field(default_factory=dict)
    cached: int = 0  # rows of the longest length in the cache of vLLM


def meshes(per_node: int, nodes: int) -> list[Mesh]:
    """Return the meshes of at most `nodes` nodes with `per_node` devices, the smallest first."""
    counts = sorted({per_node, *(2**k for k in range(per_node.bit_length()) if 2**k <= per_node)})
    whole = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    return [
        *(Mesh(1, count) for count in counts),
        *(Mesh(count, per_node) for count in whole if count > 1),
    ]


_POLL_S = 0.02
_OUT_OF_MEMORY = (ResourceError.exit_code, -9, 137)  # the last two: killed by the kernel
_PEAK = "perf/max_memory_allocated_gb"
_SETTINGS = (
    *("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    *("trainer.save_every=null", "trainer.critic_warmup=0"),
    *("trainer.project_name=trial", "trainer.experiment_name=trial"),
    *("trainer.mirror=null", "trainer.logger=[console]", "data.val_files=null"),
    *("actor_rollout_ref.model.init=random", "trainer.resume_mode=disable"),
)


@dataclass(frozen=True)
class Trial:
    """Result of a trial: bytes at the peak, and seconds; `peak` is None where memory ran out."""

    peak: int | None
    seconds: float


def try_step(words: Sequence[str], *, cuda: bool) -> Trial:
    """Run one step of `rlctl WORDS` in a new process.

    The peak is that of the fullest GPU, or of the process on a CPU. Raises RlctlError, with the end
    of the output, where the step fails for another reason than memory.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlctl-fit-") as folder:
        path = Path(folder) / "output.txt"
        options = [] if cuda else ["--inline"]
        run = [f"trainer.run_dir={folder}/runs", *_SETTINGS]
        with path.open("wb") as log:
            process = start_rlctl([*words, *run, *options], log)
            largest = 0
            try:
                while process.poll() is None:
                    largest = max(largest, _resident(process.pid))
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        seconds = time.monotonic() - begin
        if process.returncode in _OUT_OF_MEMORY:
            return Trial(None, seconds)
        if process.returncode != 0:
            tail = path.read_text(errors="replace", encoding="utf-8").splitlines()[-12:]
            raise RlctlError(
                f"the trial failed with exit code {process.returncode}",
                where="\n    ".join(["its output ends with", *tail]),
            )
        if cuda:
            rows = read_metrics(Path(folder) / "runs" / "trial" / "trial" / METRICS_FILE)
            largest = int(max(row.get(_PEAK, 0.0) for row in rows) * 2**30)
        return Trial(largest, seconds)


def _resident(pid: int) -> int:
    """Return the largest resident memory of a process so far; where unknown, the present one."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        if match := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(match[1]) * 1024
    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0

"""Rungs of the ladder, and the process of each one.

Processes are forked from one that has imported torch and transformers and has not touched the
device. A rung that crashes or hangs leaves its rows, and the device as it was.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.recorder import NOTE, Recorder, Settings, read_rows

GRACE_S = 5.0  # after its deadline, before a rung is killed
_NUM_SHOWN = 40  # lines of the output of a rung that failed


@dataclass(frozen=True)
class Rung:
    """One rung: its function MODULE:NAME(settings, recorder), and the packages that it needs.

    It has `minutes` at least.
    """

    name: str
    function: str
    packages: tuple[str, ...] = ()
    minutes: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


# What works first, then how fast it is. A rung relies on those before it.
RUNGS = (
    Rung("machine", "benchmarks.gpu.machine:measure"),
    Rung("attention", "benchmarks.gpu.correctness:attention"),
    Rung("ray", "benchmarks.gpu.ray_actor:measure", ("ray",)),
    Rung("fsdp", "benchmarks.gpu.correctness:sharding"),
    Rung("vllm-eager", "benchmarks.gpu.vllm_cycle:eager", ("vllm",)),
    Rung("vllm-compiled", "benchmarks.gpu.vllm_cycle:compiled", ("vllm",)),
    Rung("vllm-lora", "benchmarks.gpu.vllm_cycle:lora", ("vllm", "peft")),
    Rung("steps", "benchmarks.gpu.steps:measure", minutes=8.0),
    Rung("lora", "benchmarks.gpu.steps:lora", ("peft",)),
    Rung("offload", "benchmarks.gpu.memory:measure"),
    Rung("resume", "benchmarks.gpu.correctness:resume"),
    Rung("7b", "benchmarks.gpu.throughput:large", ("peft",)),
    Rung("link", "benchmarks.gpu.link:measure"),
    Rung("kernels", "benchmarks.gpu.kernels:measure"),
    Rung("generation", "benchmarks.gpu.generation:measure"),
    Rung("throughput", "benchmarks.gpu.throughput:measure"),
    Rung("trl", "benchmarks.gpu.trl_steps:measure", ("trl", "datasets")),
)


def preloaded(device: str) -> list[str]:
    """Return the modules that the process has imported which others are forked from.

    torchao, which transformers imports, asks CUDA for its device: a fork could not use it any more.
    """
    may_import = device == "cpu" or find_spec("torchao") is None
    return ["benchmarks.gpu.rungs", *(["benchmarks.gpu.work"] if may_import else [])]


def run(rung: Rung, settings: Settings, seconds: float, out: Path) -> list[dict[str, Any]]:
    """Run a rung in its process; return its rows, also those of a rung that ends early.

    A rung that fails or exceeds its time adds a note with `failed`; its output is in `out`.
    """
    rows_file, log = out / f"{rung.name}.jsonl", _log(rung, out)
    rows_file.unlink(missing_ok=True)
    context = get_context("forkserver")
    context.set_forkserver_preload(preloaded(settings.device))
    process = context.Process(target=_work, args=(rung, settings, seconds, rows_file, log))
    process.start()
    try:
        process.join(seconds + GRACE_S)
        late = process.exitcode is None
    finally:
        assert process.pid is not None, "it was started"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has left
        process.join()
    rows = read_rows(rows_file)
    why = f"ended after {seconds:.0f} s" if late else f"exit code {process.exitcode}: {_tail(log)}"
    if late or process.exitcode != 0:
        rows.append({"rung": rung.name, "table": NOTE, "what": "rest", "why": why, "failed": True})
    return rows


def _work(rung: Rung, settings: Settings, seconds: float, rows: Path, log: Path) -> None:
    """Measure a rung in this process, which becomes the leader of its group."""
    deadline = time.monotonic() + seconds
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, _, name = rung.function.partition(":")
    with rows.open("a", encoding="utf-8") as file:
        getattr(import_module(module), name)(settings, Recorder(rung.name, file, deadline))


def end_of_log(rung: Rung, out: Path) -> str:
    """Return the last lines that a rung has printed, for a machine whose files are lost soon."""
    return "\n".join(_lines(_log(rung, out))[-_NUM_SHOWN:])


def _log(rung: Rung, out: Path) -> Path:
    return out / f"{rung.name}.log"


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def _tail(log: Path) -> str:
    lines = _lines(log)
    return lines[-1][:300] if lines else "no output"

"""Settings of worker processes, and the memory that they may share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rlctl.recipes.schema.fields import ProcessLimits

GIB = 2**30
_MIN_MEMORY = 2 * GIB  # of the default: enough for Python with torch


@dataclass(frozen=True)
class Limits:
    """Limits of one worker process, in bytes and open files. No memory limit if it is None."""

    memory: int | None = None
    file_size: int = GIB
    open_files: int = 1024

    @classmethod
    def from_config(cls, limits: ProcessLimits, num_processes: int) -> Self:
        """Return the limits of each of `num_processes`."""
        memory = None if limits.memory_gb is None else int(limits.memory_gb * GIB)
        size = int(limits.file_gb * GIB)
        return cls(memory or default_memory(num_processes), size, limits.open_files)


@dataclass(frozen=True)
class WorkerSettings:
    """Number of the workers of a pool, and what each gets.

    `logs` is the folder of their output; None: stderr. `env` names environment variables that they
    get in addition to the usual ones. `limits` None: a share of the memory, and many open files.
    `python` is another interpreter, which has pydantic; None: this one.
    """

    number: int = 1
    logs: Path | None = None
    env: Sequence[str] = ()
    limits: Limits | None = None
    python: str | None = None


def container_memory() -> int | None:
    """Return the memory limit of this container in bytes, or None."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return None if text == "max" else int(text)


def usable_memory() -> int:
    """Return the bytes of memory of this machine, or of this container if they are fewer."""
    import psutil

    total = psutil.virtual_memory().total
    return min(total, container_memory() or total)


def default_memory(num_processes: int) -> int:
    """Return the memory limit of each of `num_processes`: a share of the machine's, in bytes."""
    return max(_MIN_MEMORY, usable_memory() // num_processes)

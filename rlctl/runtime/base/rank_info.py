"""Rank, device and limits of one process of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlctl.process import Access


@dataclass(frozen=True)
class RankInfo:
    """Identity and limits of one of `world_size` processes with one device each."""

    rank: int
    world_size: int
    device: str  # "cpu" or "cuda"
    num_threads: int
    timeout_s: float  # of collectives and calls
    deterministic: bool
    log_path: Path | None  # stdout and stderr are redirected there; None: not redirected
    seed: int = 0  # global seed of the process is seed + rank
    access: Access = "owner"  # users who can read the files of a process with a separate log
    host: str = ""  # address at which the other processes reach this one, once they are connected

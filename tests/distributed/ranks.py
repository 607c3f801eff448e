"""Real gloo processes for tests: `on_ranks(2, function, *args)` runs a module-level function on every rank and gives its answers."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.process import Process
from tests.forks import FORKS

_METHOD = FORKS.get_start_method()


def rank_info(rank: int = 0, world_size: int = 1) -> RankInfo:
    return RankInfo(rank, world_size, "cpu", 1, 60.0, False, None)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(place, *args)` on each rank of a process group; in this process when there is one rank."""
    if world_size == 1:
        return [function(rank_info(), *args)]
    address = Process(rank_info()).address().replace("127.0.0.1", "localhost")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _run,
            (world_size, address, Path(folder), function, args),
            world_size,
            start_method=_METHOD,
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(place, *args)` on one rank in a process of its own: a vLLM engine that is closed leaves its process unfit for another."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (1, "", Path(folder), function, args), 1, start_method=_METHOD)
        return pickle.loads((Path(folder) / "0").read_bytes())


def _run(
    rank: int,
    world_size: int,
    address: str,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    process = Process(rank_info(rank, world_size))
    process.join(address)
    (folder / str(rank)).write_bytes(pickle.dumps(function(process.rank_info, *args)))
    process.leave()

"""Real gloo processes for tests: `on_ranks(2, function, *args)` returns one result per rank."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.workers.pool_process import Process
from tests.forks import FORKS

_METHOD = FORKS.get_start_method()


def rank_info(rank: int = 0, world_size: int = 1) -> RankInfo:
    return RankInfo(rank, world_size, "cpu", 1, 60.0, False, None)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank_info, *args)` on each rank; a single rank runs in this process."""
    if world_size == 1:
        return [function(rank_info(), *args)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _run,
            (world_size, Path(folder), function, args),
            world_size,
            start_method=_METHOD,
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(rank_info, *args)` on one rank in a separate process.

    A process that has closed a vLLM engine cannot build another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (1, Path(folder), function, args), 1, start_method=_METHOD)
        return pickle.loads((Path(folder) / "0").read_bytes())


def _run(
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    process = Process(rank_info(rank, world_size))
    process.join(_address(process, folder / "address"))
    (folder / str(rank)).write_bytes(pickle.dumps(function(process.rank_info, *args)))
    process.leave()


def _address(process: Process, file: Path) -> str:
    """Return the address of the process group, which rank 0 writes to `file` for the others."""
    if process.rank_info.rank == 0:
        file.with_suffix(".new").write_text(process.address())
        file.with_suffix(".new").rename(file)
    while not file.exists():  # the first rank that fails ends the others
        time.sleep(0.01)
    return file.read_text(encoding="utf-8")

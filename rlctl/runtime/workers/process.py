"""One process of a pool: it owns one device and hosts the workers of one or several roles.

All colocated, grouped or separate placement is only a question of which workers are built in which process. The class knows nothing of Ray:
a cluster wraps it in an actor, `--inline` uses it as it is.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl.log import log_to_stderr
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.rng import seed_all

_DUMP_AFTER = 0.9  # of what a call may take


class Process:
    """Hosts workers by role name. Calls come one at a time."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self.workers: dict[str, Any] = {}
        self._calling: set[int] = set()  # threads
        if rank_info.log_path is not None:
            _redirect_output(rank_info.log_path)
            _log_to_stderr()
            log_to_stderr()
        torch.set_num_threads(rank_info.num_threads)
        seed_all(rank_info.seed + rank_info.rank)
        if rank_info.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def address(self) -> str:
        """Where the process group can meet: this host and a port the kernel says is free."""
        host = (
            "127.0.0.1"
            if self.rank_info.world_size == 1
            else socket.gethostbyname(socket.gethostname())
        )
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Form the process group; every process of the pool calls this at the same time."""
        rank_info = self.rank_info
        if rank_info.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each process its own device only
        if rank_info.world_size > 1 or rank_info.device == "cuda":
            backend = "cuda:nccl,cpu:gloo" if rank_info.device == "cuda" else "gloo"
            timeout = timedelta(seconds=rank_info.timeout_s)
            dist.init_process_group(
                backend,
                init_method=address,
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=timeout,
            )

    def build(self, role: str, worker: type, spec: object) -> None:
        """Make the worker of `role`."""
        self.workers[role] = worker(self.rank_info, spec)

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the worker of `role`. One that hangs leaves the stacks of all threads in the log."""
        thread = threading.get_ident()
        self._calling.add(thread)
        faulthandler.dump_traceback_later(_DUMP_AFTER * self.rank_info.timeout_s, file=2)
        try:
            return getattr(self.workers[role], method)(*args, **kwargs)
        finally:
            self._calling.discard(thread)
            if (
                not self._calling
            ):  # an engine may answer several calls at once, and there is one timer
                faulthandler.cancel_dump_traceback_later()

    def leave(self) -> None:
        """End what workers have started, and take the process group down."""
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(
        parents=True, exist_ok=True
    )  # on another node, where no folder of the run is mounted
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _log_to_stderr() -> None:
    """Write rlctl's log records, from level INFO, to stderr, which is the worker's log file."""
    logger = logging.getLogger("rlctl")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)

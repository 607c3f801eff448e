"""Process of a pool: it owns one device and hosts the workers of one or several roles.

Placement decides only which workers are built in which process. The class does not depend on Ray:
a cluster wraps it in a Ray actor, `--inline` uses it directly.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlctl.causes import as_rlctl_error
from rlctl.debugging import call_on_breakpoint, mark_breakpoints
from rlctl.errors import RlctlError
from rlctl.log import log_to_stderr
from rlctl.process import relax_umask
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.workers.process_memory import keep_freed_memory, use_expandable_segments
from rlctl.runtime.workers.rng import seed_all

if TYPE_CHECKING:
    from rlctl.runtime.base.stored_fields import PackedRows
    from rlctl.runtime.rollout.signed_store import Meeting
    from rlctl.runtime.workers.trace import Trace, TraceSpec

_LOOPBACK = "127.0.0.1"
_DUMP_AFTER = 0.9  # fraction of the call timeout after which stacks are dumped


class Process:
    """Hosts workers by role name. Calls come one at a time."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self.workers: dict[str, Any] = {}
        self._trace: Trace | None = None
        self._meeting: Meeting | None = None  # of the process group
        self._interrupts: threading.Event | None = None  # set: they are no longer looked for
        if rank_info.log_path is not None:
            relax_umask(rank_info.access)  # Ray's processes do not inherit the umask of the run
            _redirect_output(rank_info.log_path)
            _log_to_stderr()
            log_to_stderr()
            mark_breakpoints(rank_info.log_path)
            call_on_breakpoint(faulthandler.cancel_dump_traceback_later)
        torch.set_num_threads(rank_info.num_threads)
        if rank_info.device == "cpu":
            keep_freed_memory()
        else:
            from rlctl.runtime.model.compiled import enable_compiler

            use_expandable_segments()
            enable_compiler()
            os.environ.setdefault("NCCL_DEBUG", "WARN")  # to the log; by default it says nothing
        seed_all(rank_info.seed + rank_info.rank)
        if rank_info.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def address(self, host: str = _LOOPBACK) -> str:
        """Return an address for the process group, at which this process is from now on.

        `host` is an address of this machine; by default only its processes can reach it.
        Empty if the process needs no group.
        """
        if not self._needs_group:
            return ""
        from rlctl.runtime.rollout.signed_store import Meeting

        self._meeting = Meeting(host, self.rank_info.world_size)
        return self._meeting.address

    def join(self, address: str) -> None:
        """Join the process group at `address`, which rank 0 has returned.

        Collective: every process of the pool calls it.
        """
        rank_info = self.rank_info
        meeting = self._meeting
        self._meeting = None
        if rank_info.device == "cuda":
            from rlctl.runtime.model.gpu_kernels import use_flash_attention_3

            torch.cuda.set_device(0)  # under Ray only the device of the process is visible
            use_flash_attention_3()
        if self._needs_group:
            from rlctl.runtime.rollout.rendezvous import use_interface_to
            from rlctl.runtime.rollout.signed_store import join_store

            backend = "cuda:nccl,cpu:gloo" if rank_info.device == "cuda" else "gloo"
            timeout = timedelta(seconds=rank_info.timeout_s)
            self.rank_info = replace(rank_info, host=use_interface_to(address.split()[0]))
            dist.init_process_group(
                backend,
                store=join_store(address, meeting, rank_info.world_size, timeout),
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=timeout,
            )

    @property
    def _needs_group(self) -> bool:
        return self.rank_info.world_size > 1 or self.rank_info.device == "cuda"

    def listen_for_interrupts(self, is_requested: Callable[[], bool]) -> None:
        """Interrupt calls that only read once `is_requested` returns True."""
        from rlctl.runtime.workers.interrupt_listener import listen

        self._interrupts = threading.Event()
        listen(is_requested, self._interrupts, self.rank_info.world_size)

    def build(self, role: str, worker: type, *args: object, **kwargs: object) -> None:
        """Build the worker of `role`."""
        self.workers[role] = worker(self.rank_info, *args, **kwargs)

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the worker of `role` and return its result.

        A call that hangs dumps the stacks of all threads to the log shortly before its timeout.
        """
        faulthandler.dump_traceback_later(_DUMP_AFTER * self.rank_info.timeout_s, file=2)
        try:
            with self._measured():
                return getattr(self.workers[role], method)(*args, **kwargs)
        except KeyboardInterrupt:  # Ray would take the process for a lost one
            if self._interrupts is None:  # in the controller's process
                raise
            raise RlctlError(f"{role}.{method} was interrupted by a request to stop") from None
        except SystemExit as error:  # of users' code: it would end the process without a message
            if (known := as_rlctl_error(error)) is None:
                raise
            raise known from error
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _measured(self) -> AbstractContextManager[None]:
        """Include the memory of the block in the peak of a GPU."""
        if self.rank_info.device == "cpu":
            return nullcontext()
        from rlctl.runtime.workers.device_usage import PEAK

        return PEAK.phase(self.rank_info.device)

    def call_detached(
        self,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        min_bytes: int,
    ) -> tuple[dict[str, PackedRows] | None, Any]:
        """Return per-token values of a call's result apart from the rest: see `detach`."""
        from rlctl.runtime.base.stored_fields import detach

        return detach(self.call(role, method, args, kwargs), min_bytes)

    def start_trace(self, spec: TraceSpec) -> None:
        """Start a trace of this process."""
        from rlctl.runtime.workers.trace import Trace

        self._trace = Trace(spec, self.rank_info.device)

    def write_trace(self, prefix: Path) -> Path:
        """End the trace and return its file, `PREFIX-RANK.json`."""
        assert self._trace is not None, "no trace was started"
        file = prefix.with_name(f"{prefix.name}-{self.rank_info.rank}.json")
        self._trace.write(file)
        self._trace = None
        return file

    def leave(self) -> None:
        """Close the workers and destroy the process group."""
        if self._interrupts is not None:
            self._interrupts.set()
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process, including native code's, to the file `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)  # another node may not mount the run's folder
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _log_to_stderr() -> None:
    """Write rlctl's log records, from level INFO, to stderr, which is the worker's log file."""
    logger = logging.getLogger("rlctl")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)

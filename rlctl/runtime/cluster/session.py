"""Ray session: starts within a deadline or fails, and removes its processes and folders."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlctl.cores import OPENMP_WAIT, SPIN_COUNT
from rlctl.debugging import debug_variables, post_mortem
from rlctl.errors import Terminated
from rlctl.recipes import schema
from rlctl.runtime.cluster import fork_server
from rlctl.runtime.cluster.daemons import fewer_daemons
from rlctl.runtime.cluster.health import OnLost, RayHealth
from rlctl.runtime.cluster.ray_access import (
    address_of,
    check_packages,
    on_loopback,
    protect_token,
    require_token,
)
from rlctl.runtime.cluster.ray_start import DaemonEndedError, RayStart
from rlctl.runtime.cluster.session_folder import remove_stale, session_folder

LOG = logging.getLogger(__name__)

# An empty PYTHONDONTWRITEBYTECODE lets workers cache bytecode: without it, importing torch and
# transformers takes seconds longer.
_WORKER_ENV = {
    "PYTHONDONTWRITEBYTECODE": "",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}
# Network interfaces of collectives, which the driver passes on to workers of other machines.
_GLOO = "GLOO_SOCKET_IFNAME"
INTERFACES = (_GLOO, "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")

RAY_SETTINGS = {
    # Ray would start a worker for each slot before it knows the environment of pools' processes.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # by default 15: other programs would hold up a run
    # On a busy machine imports take minutes; rlctl has other deadlines.
    "RAY_worker_register_timeout_seconds": "3600",
    "RAY_agent_register_timeout_ms": "3600000",
}

_SHUTDOWN_S = 10.0  # a healthy Ray needs one or two


@contextmanager
def ray_session(
    init: schema.RayInit,
    num_cpus: int,
    num_threads: int,
    timeout_s: float,
    on_lost: OnLost = lambda _: None,
    log_to_driver: bool = False,
) -> Iterator[None]:
    """Connect to the cluster at `init.address` or RAY_ADDRESS, else start one on this machine.

    A started cluster has `num_cpus` slots, listens on the loopback interface, and is shut down at
    the end; Ray sets RAY_ADDRESS in its jobs. Raises ResourceError with the tail of Ray's log if it
    does not start within `timeout_s`, and for a cluster that other machines reach without a token;
    RlctlError instead of an error in the block if Ray's GCS or raylet has exited. If the block does
    not end by itself then, this process calls `on_lost` with that error and exits with
    code 1. `log_to_driver` prints what workers without a log file print.
    """
    import ray

    check_packages(init)
    address = address_of(init)
    options = _options(init, num_threads, address) | {"log_to_driver": log_to_driver}
    # Processes of trackers must survive Ray: they record the end of the run.
    others = set(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        health = RayHealth(others, on_lost)
        try:
            if address is None:
                _Local(options, init, num_cpus, timeout_s, others).start(stack)
            else:
                start = RayStart(others)
                stack.callback(start.close)
                start.run(options | {"address": address}, None, timeout_s)
            _take_back_signals()
            gcs = None  # a started cluster is watched by its processes, a proxy reports its loss
            if address is not None and not address.startswith("ray://"):
                gcs = ray.get_runtime_context().gcs_address
                require_token(gcs)
            health.start(gcs)
            try:
                yield
            except SystemExit as error:
                # Ray's calls replace the exit that a signal handler raises by SystemExit(1).
                if type(error) is SystemExit and Terminated.latest is not None:
                    raise Terminated.latest from error
                raise
            except Exception as error:
                if (lost := health.error()) is not None:
                    raise lost from error
                raise
        finally:
            health.stop()
            _shut_down(others, health.processes)


@contextmanager
def recorded_timeline(file: str | None) -> Iterator[None]:
    """Write Ray's timeline at the end of a block in a session, if a file is named."""
    yield
    if file is not None:
        import ray

        ray.timeline(file)


@dataclass(frozen=True)
class _Local:
    """A new cluster on this machine; see `ray_session` for the arguments."""

    options: dict[str, Any]
    init: schema.RayInit
    num_cpus: int
    timeout_s: float
    others: set[psutil.Process]

    def start(self, stack: ExitStack) -> None:
        """Start the cluster; `stack` gets what must be undone once it is shut down.

        Under load a daemon may abort at its start. A second cluster is then tried, once.
        """
        first = RayStart(self.others)
        undone = stack.enter_context(ExitStack())
        try:
            self._start(first, undone)
        except DaemonEndedError as error:
            LOG.warning("%s; a second start follows", error)
            # Not `ray.shutdown`: without a GCS it waits, and would then end the second cluster.
            ended = set(psutil.Process().children(recursive=True)) - self.others
            _kill(ended)
            if not first.has_returned(self.timeout_s):
                raise
            undone.close()
            self._start(RayStart(self.others | ended), stack)

    def _start(self, start: RayStart, stack: ExitStack) -> None:
        remove_stale()
        protect_token()
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        # Ray's debugger finds the waiting processes through the dashboard.
        dashboard = self.init.include_dashboard or post_mortem()
        folder = stack.enter_context(session_folder())
        stack.callback(start.close)
        stack.enter_context(on_loopback())
        given = self.options["log_to_driver"], self.timeout_s, start.given_up, dashboard
        stack.enter_context(fewer_daemons(*given))
        start.run(self._options(folder, dashboard), folder, self.timeout_s)

    def _options(self, folder: Path, dashboard: bool) -> dict[str, Any]:
        """Return the arguments of `ray.init`."""
        environment = self.options["runtime_env"]
        # Temporary files of workers, such as vLLM's sockets, are removed with the session.
        variables = {"TMPDIR": str(folder)} | environment["env_vars"]
        return self.options | {
            "runtime_env": environment | {"env_vars": variables},
            "num_cpus": self.num_cpus,
            "num_gpus": self.init.num_gpus if self.init.num_gpus is not None else _num_gpus(),
            "object_store_memory": self.init.object_store_memory,
            "include_dashboard": dashboard,
            "_temp_dir": str(folder),
        }


def _num_gpus() -> int | None:
    """Return the number of GPUs that torch sees; None if it sees none, so that Ray counts."""
    import torch

    return torch.cuda.device_count() or None


def _options(init: schema.RayInit, num_threads: int, address: str | None) -> dict[str, Any]:
    """Return the arguments of `ray.init` for any cluster; set Ray's environment variables."""
    env = {name: value for name, value in _WORKER_ENV.items() if value or name in os.environ}
    env |= {name: os.environ[name] for name in INTERFACES if name in os.environ}
    if fork_server.on_this_machine(address) and _GLOO in env:
        env[_GLOO] = ""  # its processes meet on the loopback interface
    # Limits the threads that libraries start at import; torch.set_num_threads sets those of torch.
    env["OMP_NUM_THREADS"] = str(num_threads)
    given = {name: str(value) for name, value in init.runtime_env.get("env_vars", {}).items()}
    if os.environ.get(OPENMP_WAIT[0]) == SPIN_COUNT and OPENMP_WAIT[1] in given:
        del os.environ[OPENMP_WAIT[0]]  # workers would inherit it, and it would win
    env |= {name: os.environ[name] for name in OPENMP_WAIT if name in os.environ}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A given environment may hold packages, or variables that are read at import.
    python = {} if init.runtime_env else fork_server.python(address)
    return {
        "runtime_env": python | init.runtime_env | {"env_vars": env | debug_variables() | given},
        "logging_level": "ERROR",
    }


def _shut_down(others: set[psutil.Process], seen: set[psutil.Process]) -> None:
    """Shut down Ray and kill its remaining processes: `seen` and all children except `others`.

    `ray.shutdown` gets a deadline: it waits for minutes if a scheduler has killed Ray's daemons.
    """
    import ray

    started = seen | (set(psutil.Process().children(recursive=True)) - others)
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_S)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait again
    _, left = psutil.wait_procs(started, timeout=_SHUTDOWN_S / 5)
    _kill(left)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has exited, or belongs to another user
            process.kill()


def _take_back_signals() -> None:
    """Restore Python's SIGTERM handler: Ray's core installs one that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

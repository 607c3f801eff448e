"""Ray from start to end: it starts within a deadline or says why not, and leaves no process and no folder behind."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlctl.errors import ResourceError
from rlctl.recipes import schema
from rlctl.runs.logs import format_tails

# Workers are told their number of threads by torch.set_num_threads; this bounds what libraries grab at import. An empty
# PYTHONDONTWRITEBYTECODE lets them cache what they import: torch and transformers take seconds without.
_WORKER_ENV = {
    "PYTHONDONTWRITEBYTECODE": "",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "",
}

_PREFIX, _LOCK = "rlctl-ray-", "lock"
_PARENT = Path("/tmp")  # short: socket paths in a session's folder may have 107 characters
_SHUTDOWN_S = 10.0  # a healthy Ray needs one or two


@contextmanager
def ray_session(
    init: schema.RayInit, num_cpus: int, num_threads: int, timeout_s: float, timeline: str | None
) -> Iterator[None]:
    """A cluster of this machine with `num_cpus` slots, or the one at `init.address`, or at RAY_ADDRESS, which Ray sets for its jobs.
    Left at the end; one of our own is shut down.

    Raises `ResourceError` with the tail of Ray's own log if it does not start within `timeout_s` seconds.
    """
    import ray

    env = {name: value for name, value in _WORKER_ENV.items() if value or name in os.environ} | {
        "OMP_NUM_THREADS": str(num_threads)
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    variables = env | {
        name: str(value) for name, value in init.runtime_env.get("env_vars", {}).items()
    }
    options: dict[str, object] = {
        "runtime_env": init.runtime_env | {"env_vars": variables},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    folder: Path | None = None
    others = set(
        psutil.Process().children(recursive=True)
    )  # trackers have processes, too, and are told of the run's end after Ray's
    address = init.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        _remove_stale()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it does
        variables.setdefault(
            "TMPDIR", str(folder)
        )  # what workers leave there (vLLM its sockets) goes with the session
        options |= {
            "num_cpus": num_cpus,
            "include_dashboard": init.include_dashboard,
            "_temp_dir": str(folder),
        }
        options |= {"num_gpus": init.num_gpus, "object_store_memory": init.object_store_memory}
    else:
        options["address"] = address
    over = threading.Event()
    try:
        _start(options, folder, timeout_s, over)
        _take_back_signals()
        yield
        if timeline is not None:
            ray.timeline(timeline)
    finally:
        _shut_down(others)
        over.set()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _start(
    options: dict[str, object], folder: Path | None, timeout_s: float, over: threading.Event
) -> None:
    """`ray.init` in a thread of its own, because it has no deadline and cannot be interrupted everywhere.

    The thread stays until `over`: Ray's processes ask the kernel to be killed when the thread that started them ends.
    """
    import ray

    failure: list[BaseException] = []
    started = threading.Event()

    def start() -> None:
        try:
            ray.init(**options)  # pyright: ignore[reportArgumentType]
        except BaseException as error:  # handed to the waiting thread, which raises it
            failure.append(error)
        started.set()
        over.wait()

    threading.Thread(target=start, name="ray-init", daemon=True).start()
    if not started.wait(timeout_s):
        raise ResourceError(
            f"Ray did not start within {timeout_s:g} s",
            where=_log_tail(folder),
            hint="trainer.timeouts.ray_start_s",
        )
    if failure:
        hint = "`--inline` trains without Ray"
        raise ResourceError(
            f"Ray did not start: {failure[0]}", where=_log_tail(folder), hint=hint
        ) from failure[0]


def _remove_stale() -> None:
    """Folders of sessions whose process was killed: nobody else would ever remove Ray's logs and sockets in them."""
    for path in _PARENT.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), path.open("w") as lock:  # somebody else's, or just removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _shut_down(others: set[psutil.Process]) -> None:
    """End Ray and every process it started here, which all are but `others`. A scheduler may have killed its daemons already, and then
    `ray.shutdown` waits for them for minutes: it gets a deadline, and what is left is killed."""
    import ray

    started = set(psutil.Process().children(recursive=True)) - others
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_S)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait once more
    _, left = psutil.wait_procs(started, timeout=_SHUTDOWN_S / 5)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _take_back_signals() -> None:
    """Ray's core takes SIGTERM for a crash and aborts the process. Setting Python's own handler again puts it back in force."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _log_tail(folder: Path | None, num_lines: int = 10) -> str | None:
    if folder is None:
        return None
    names = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
    logs = [log for name in names for log in folder.glob(f"session_2*/logs/{name}")]
    return format_tails(logs, num_lines) or None

"""Processes: start, end, umask, locks, and the identity that shows later that one has exited."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:  # workers of users' code do not load it
    import psutil

Access = Literal["owner", "group", "all"]
MODES: dict[Access, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}
LOCK_FILE = ".lock"  # of a folder, locked by its driver
_LOCK_S = 1.0
FORK_SERVER = "rlctl-forks"  # name of the process that forks a run's workers


@dataclass(frozen=True)
class DriverProcess:
    """Process identified by pid, start time, host and boot, so that a reused pid is not confused.

    `started` is in clock ticks since boot on Linux (unaffected by clock changes), elsewhere in
    seconds since the epoch. `pid_namespace` is the one in which `pid` counts, None for a record of
    an earlier version.
    """

    pid: int
    started: float
    host: str
    boot_id: str
    pid_namespace: str | None = None

    @classmethod
    def current(cls) -> DriverProcess:
        """Return the identity of this process."""
        started = _started(os.getpid())
        assert started is not None  # this process exists
        return cls(os.getpid(), started, socket.gethostname(), _boot_id(), _pid_namespace())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DriverProcess:
        """Return the process of a record; ignore fields written by a later version of rlctl."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    @property
    def is_visible(self) -> bool:
        """True if `pid` counts here: same host since its last boot, and same PID namespace."""
        return (self.host, self.boot_id) == (socket.gethostname(), _boot_id()) and (
            self.pid_namespace in (None, _pid_namespace())
        )

    def alive(self, folder: Path) -> bool | None:
        """Return True if the process, which drives `folder`, is running; None if that is unknown.

        Of a process in another container of this host the lock of the folder decides. Unknown are
        processes on other hosts, and those in containers on a file system without locks.
        """
        if self.is_visible:
            return _started(self.pid) == self.started
        if self.host != socket.gethostname():
            return None
        locked = is_locked(folder)
        if locked is None and self.boot_id != _boot_id():
            return False
        return locked


def lock_folder(folder: Path, name: str = LOCK_FILE) -> IO[bytes] | None:
    """Lock a folder for this process until the returned file is closed or the process exits.

    `name` is the file in it that is locked. A file system without locks is no error. Returns None
    if another process has the lock.
    """
    file = (folder / name).open("ab")
    deadline = time.monotonic() + _LOCK_S  # `is_locked` of another process has it for a moment
    while _lock(file, fcntl.LOCK_EX) is False:
        if time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(_LOCK_S / 10)
    return file


def is_locked(folder: Path, name: str = LOCK_FILE) -> bool | None:
    """Return True if another process has locked the folder; None if that cannot be known.

    A process that has the lock itself would lose it here.
    """
    try:
        with (folder / name).open("rb") as file:
            taken = _lock(file, fcntl.LOCK_SH)
    except OSError:
        return None
    return None if taken is None else not taken


def _lock(file: IO[bytes], kind: int) -> bool | None:
    """Return True if the file is locked now, False if another process has it; None: no locks.

    POSIX locks belong to a process: forked children do not inherit them, unlike those of `flock`.
    """
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def relax_umask(access: Access) -> int:
    """Let users read what this process and its new children create; return the umask before."""
    before = os.umask(0o077)
    os.umask(before & ~MODES[access])
    return before


@contextmanager
def relaxed_umask(access: Access) -> Iterator[None]:
    """Call `relax_umask` for the block."""
    before = relax_umask(access)
    try:
        yield
    finally:
        os.umask(before)


def uptime() -> float:
    """Return seconds since boot, the same for all processes and independent of the clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Send this process the signal `number` when its parent exits; also for `preexec_fn`.

    Linux only (prctl, PR_SET_PDEATHSIG = 1); no-op elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)


def start_rlctl(
    words: Sequence[str],
    log: IO[bytes] | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `rlctl WORDS`, out of reach of Ctrl-C; it receives SIGTERM when this process exits.

    With `log` it writes there, has no stdin, and leads a session.
    """
    process_group = 0
    stdin = stderr = None
    if log is not None:
        process_group = None
        stdin = subprocess.DEVNULL
        stderr = subprocess.STDOUT
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rlctl", *words],
        stdin=stdin,
        stdout=log,
        stderr=stderr,
        cwd=cwd,
        env=env,
        preexec_fn=die_with_parent,
        start_new_session=log is not None,
        process_group=process_group,
    )


def kill_and_exit(more: Iterable[psutil.Process] = ()) -> NoReturn:
    """Kill the children of this process and `more`, and exit with code 1 without any cleanup."""
    import psutil

    for process in {*psutil.Process().children(recursive=True), *more}:
        with suppress(psutil.Error):  # it has exited, or belongs to another user
            process.kill()
    os._exit(1)


def _started(pid: int) -> float | None:
    """Return the start time of the process, or None if it does not exist or is a zombie."""
    if _has_proc():
        try:
            # proc(5): field 2, the command, is in parentheses and may contain any character;
            # field 3 is the state, field 22 the start time.
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in "ZX":
            return None
        return float(fields[19])
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@cache
def _pid_namespace() -> str | None:
    path = Path("/proc/self/ns/pid")
    return str(path.readlink()) if path.is_symlink() else None


@cache
def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()


@cache
def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    import psutil

    return str(int(psutil.boot_time()))

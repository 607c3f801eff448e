"""Restrictions of worker processes: environment, signals, memory, files.

They contain mistakes and careless code. They are no barrier against hostile code, which runs as
the same user and can read its files and use the network. Landlock (Linux) restricts the files and
signals of a process and its children; it needs no privileges, and a kernel without it restricts
nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from rlctl.cores import allowed_cores
from rlctl.process import die_with_parent
from rlctl.runtime.sandbox.worker_settings import Limits

# Variables that find programs, libraries, caches and the language; none of them is a secret.
_ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "TMP", "TEMP", "TERM", "COLUMNS", "NO_COLOR", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("OMP_*", "GOMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "NUMEXPR_*", "GOTO_*"),
    "TOKENIZERS_PARALLELISM",
    *("*_CACHE", "*_CACHE_DIR", "*_CACHE_HOME", "HF_HOME", "TORCH_HOME", "NLTK_DATA"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def allowed_environment(
    environment: Mapping[str, str], further: Iterable[str] = ()
) -> dict[str, str]:
    """Return the variables of `environment` that a worker process gets.

    These are the allow-list without names that look like secrets, and those named in `further`. The
    address of a proxy that has a password must be named.
    GPUs are hidden unless `further` names CUDA_VISIBLE_DEVICES.
    """
    named = set(further)
    allowed = {
        name: value
        for name, value in environment.items()
        if name in named
        or (
            not _SECRET.search(name)
            and any(fnmatchcase(name, pattern) for pattern in _ALLOWED)
            and not (name.lower().endswith("_proxy") and "@" in value)
        )
    }
    if "CUDA_VISIBLE_DEVICES" in named:
        return allowed
    return {**allowed, "CUDA_VISIBLE_DEVICES": ""}


def withheld_variable(error: str, further: Iterable[str] = ()) -> str | None:
    """Return the variable that a KeyError names and that a worker process did not get, or None."""
    found = re.search(r"\bKeyError: '(\w+)'", error)
    if found is None or found[1] not in os.environ:
        return None
    if found[1] in allowed_environment(os.environ, further):
        return None
    return found[1]


def restrict(limits: Limits) -> None:
    """Apply `limits` to this process and its children, and forbid signals to all others."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: limits.open_files,
    }
    if limits.memory is not None:
        # Writable private memory. RLIMIT_AS would also count address space that is only reserved.
        bounds[resource.RLIMIT_DATA] = limits.memory
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        set_limit(kind, bound)
    forbid_signals()


def set_limit(kind: int, bound: int) -> None:
    """Set a limit of this process. One that the system refuses is a note: macOS refuses some."""
    try:
        resource.setrlimit(kind, (bound, bound))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"note: this system does not set the limit {kind} to {bound}: {error}\n")


def limit_cpu(wall_s: float) -> None:
    """Limit the CPU time of this process, and of each child that it starts from now on.

    The limit is `wall_s` on all cores, above what this process has used. It ends threads and
    children that compute after a call has returned; Python code in a call has a timer.
    """
    cores = allowed_cores()
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound = int(used.ru_utime + used.ru_stime + wall_s * cores) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (bound, hard))


def die_with(parent: int, number: signal.Signals) -> None:
    """Make the kernel send this process the signal `number` when `parent` exits (Linux only).

    It does so when the parent's thread that started this process ends. Exits if `parent` is gone.
    """
    die_with_parent(number)
    if os.getppid() != parent:
        sys.exit()


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process instead of init's (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(worker: int) -> None:
    """Kill the process group of the child `worker` and all other children, and reap the others.

    `worker` stays a zombie, which keeps its group's number from being used again.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    if hasattr(os, "waitid"):  # not on macOS before Python 3.13
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # its children become this process's
    while others := _children() - {worker}:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> set[int]:
    """Return the children of this single-threaded process; empty where /proc does not list them."""
    try:
        children = Path("/proc/thread-self/children").read_text(encoding="utf-8")
        return {int(pid) for pid in children.split()}
    except OSError:
        return set()


_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)
# Numbers of system calls, on every platform.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION = 1  # flag: return the version of Landlock
_PATH_BENEATH = 1  # kind of a rule
_WRITE_FILE = 1 << 1
_WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove, make
# First version that has a right, and the right.
_REFER = (2, 1 << 13)
_TRUNCATE = (3, 1 << 14)
_DEVICES = (5, 1 << 15)
# First version, and the bit in `scoped`.
_ABSTRACT_SOCKETS = (6, 1 << 0)
_SIGNALS = (6, 1 << 1)


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def protects_files() -> bool:
    """Return True if the kernel has Landlock, which keeps a process from writing to files."""
    return _version() >= 1


def protects_sizes() -> bool:
    """Return True if Landlock also keeps a process from emptying files (Linux 6.2)."""
    return _version() >= _TRUNCATE[0]


def protects_processes() -> bool:
    """Return True if Landlock also keeps a process from sending signals to others (Linux 6.12)."""
    return _version() >= _SIGNALS[0]


def restrict_files(folder: Path) -> bool:
    """Forbid to write outside of `folder`, and to reach other processes by signals and ptrace.

    Return True if the kernel protects the files.
    """
    version = _version()
    if version < 1:
        return False

    def known(*rights: tuple[int, int]) -> int:
        return sum(right for first, right in rights if version >= first)

    writes = _WRITES + known(_REFER, _TRUNCATE)
    rules = _Ruleset(writes + known(_DEVICES), 0, known(_ABSTRACT_SOCKETS, _SIGNALS))
    to_null = _WRITE_FILE + known(_TRUNCATE)
    return _restrict(rules, [(folder, writes), (Path(os.devnull), to_null)])


def forbid_signals() -> None:
    """Allow signals to this process and its descendants only (Linux 6.12)."""
    first, bit = _SIGNALS
    if _version() >= first:
        _restrict(_Ruleset(0, 0, bit))


def _version() -> int:
    """Return the version of the interface; below 1 if it is missing."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION)


def _restrict(rules: _Ruleset, allowed: Iterable[tuple[Path, int]] = ()) -> bool:
    """Deny what `rules` handle, but what is `allowed` below a path; return whether it is denied."""
    libc = ctypes.CDLL(None)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    for path, access in allowed:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(access, parent)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    denied = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return denied

"""Isolation of code that a model has written: no sockets, no files outside of a folder (Linux).

bubblewrap, where it is installed and the kernel allows its namespaces, makes all files read-only.
Otherwise namespaces (user, network, processes) and Landlock remain, which do not cover attributes
of files; a kernel or a container may not allow them either. A seccomp filter denies sockets, and
memory that no limit counts. None of them needs privileges.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
from functools import cache

from rlctl.runtime.sandbox.limits import die_with, protects_files

_NEW_USER, _NEW_NET, _NEW_PID = 0x10000000, 0x40000000, 0x20000000  # flags of unshare(2)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22

# By machine: its number for seccomp, and its syscalls socket, memfd_create and shmget.
_MACHINES = {
    "x86_64": (0xC000003E, 41, 319, 29),
    "aarch64": (0xC00000B7, 198, 279, 194),
}
_IO_URING_SETUP = 425
_OTHER_ABI = 0x40000000  # of x86: numbers from here are another interface
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of BPF
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AF_UNIX = 1


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_uint16), ("code", ctypes.c_char_p)]


def bubblewrap(folder: str, file_size: int, *, network: bool) -> list[str]:
    """Return the command in front of a program that may write `file_size` bytes to `folder`."""
    return [
        *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--proc", "/proc", "--size", str(max(file_size, 1)), "--tmpfs", folder),
        *("--chdir", folder, "--unshare-all", "--unshare-user"),
        *("--disable-userns", "--cap-drop", "ALL"),
        *("--die-with-parent", *(["--share-net"] if network else []), "--"),
    ]


@cache
def has_bubblewrap() -> bool:
    """Return True if bubblewrap is installed and works here."""
    if shutil.which("bwrap") is None:
        return False
    command = [*bubblewrap("/tmp", 2**20, network=False), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def missing_isolation() -> str | None:
    """Return what programs of the python tool are not kept from here; None: nothing."""
    if has_bubblewrap():
        return None
    if protects_files():
        allowed = "change permissions, times and attributes of your files"
    else:
        allowed = "write to, change and delete your files (there is no Landlock)"
    advice = bubblewrap_advice()
    return (
        "bubblewrap is not installed or not allowed here: programs of the python tool can "
        f"{allowed}, and fill the disk with their own" + (f" ({advice})" if advice else "")
    )


def bubblewrap_advice() -> str | None:
    """Return the command that installs bubblewrap with this system's installer; None: no such."""
    installers = {
        "apt-get": "apt install",
        "dnf": "dnf install",
        "zypper": "zypper install",
        "pacman": "pacman -S",
        "apk": "apk add",
    }
    found = next((words for name, words in installers.items() if shutil.which(name)), None)
    return None if found is None else f"{found} bubblewrap"


def enter_namespaces() -> bool:
    """Leave the network and the processes of this machine, and return True if that worked.

    Returns in a child, whose exit status becomes that of this process. All processes that the child
    starts end with it.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_NET | _NEW_PID) != 0:
        return False
    child = os.fork()
    if child == 0:
        die_with(0, signal.SIGKILL)  # 0 is the parent: it is outside of the new namespace
        return True
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def restrict_calls(*, deny_network: bool) -> bool:
    """Forbid Unix sockets, or all if `deny_network`, and memory outside of files and mappings.

    Return True if the kernel enforces it. Pairs of connected sockets remain.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    machine, socket, memfd_create, shmget = _MACHINES[platform.machine()]
    refuse, absent = _ERROR + _EPERM, _ERROR + _ENOSYS
    program = [  # instruction, value, instructions to skip if true, if false
        (_LOAD, _MACHINE, 0, 0),
        (_EQUAL, machine, 1, 0),
        (_RETURN, _KILL, 0, 0),
        (_LOAD, _NUMBER, 0, 0),
        (_AT_LEAST, _OTHER_ABI, 0, 1),
        (_RETURN, _KILL, 0, 0),
    ]
    for number in (memfd_create, shmget, _IO_URING_SETUP):
        program += [(_EQUAL, number, 0, 1), (_RETURN, absent, 0, 0)]
    program += [(_EQUAL, socket, 0, 3), (_LOAD, _ARGUMENT, 0, 0)]
    program += [(_AT_LEAST, 0, 0, 1)] if deny_network else [(_EQUAL, _AF_UNIX, 0, 1)]
    program += [(_RETURN, refuse, 0, 0), (_RETURN, _ALLOW, 0, 0)]
    code = b"".join(struct.pack("HBBI", code, yes, no, k) for code, k, yes, no in program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program), code)), 0, 0) == 0

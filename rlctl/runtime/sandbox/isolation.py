"""Isolation of code that a model has written: no network, no files outside of a folder (Linux).

The means are namespaces of the kernel (user, network, processes) and Landlock; both need no
privileges, but a kernel or a container may not allow them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from rlctl.runtime.sandbox.limits import die_with

_NEW_USER, _NEW_NET, _NEW_PID = 0x10000000, 0x40000000, 0x20000000  # flags of unshare(2)
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # syscall numbers, on every platform
_VERSION, _PATH_BENEATH = 1, 1
_WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove, make
_REFER, _TRUNCATE = (2, 1 << 13), (3, 1 << 14)  # first version, and the right
_TCP = (4, 0b11)  # bind and connect


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]


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


def restrict_files(folder: Path, *, deny_tcp: bool) -> tuple[bool, bool]:
    """Forbid to write outside of `folder` and, if `deny_tcp`, to use TCP.

    Returns which of the two the kernel enforces.
    """
    if sys.platform != "linux":
        return False, False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return False, False
    writes = _WRITES + sum(right for first, right in (_REFER, _TRUNCATE) if version >= first)
    has_tcp = deny_tcp and version >= _TCP[0]
    rules = _Ruleset(writes, _TCP[1] if has_tcp else 0, 0)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False, False
    to_file = (1 << 1) + (_TRUNCATE[1] if version >= _TRUNCATE[0] else 0)
    for path, access in ((folder, writes), (Path(os.devnull), to_file)):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(access, parent)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_enforced = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return is_enforced, is_enforced and has_tcp

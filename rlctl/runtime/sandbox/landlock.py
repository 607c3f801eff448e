"""Landlock: restrictions of files and signals that a process puts on itself (Linux).

They hold for its children, too, and need no privileges. No-op where the kernel has no Landlock.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # syscall numbers, on every platform
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE = 1 << 1
_WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove, make
_REFER, _TRUNCATE = (2, 1 << 13), (3, 1 << 14)  # first version, and the right
_SIGNALS = (6, 1 << 1)  # first version, and the bit in `scoped`


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def restrict_files(folder: Path) -> None:
    """Forbid to write outside of `folder`."""
    version = _version()
    writes = _WRITES + sum(right for first, right in (_REFER, _TRUNCATE) if version >= first)
    to_file = _WRITE_FILE + (_TRUNCATE[1] if version >= _TRUNCATE[0] else 0)
    if version >= 1:
        _restrict(_Ruleset(writes, 0, 0), [(folder, writes), (Path(os.devnull), to_file)])


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


def _restrict(rules: _Ruleset, allowed: Iterable[tuple[Path, int]] = ()) -> None:
    """Deny what `rules` handle, but what is `allowed` below a path."""
    libc = ctypes.CDLL(None)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return
    for path, access in allowed:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(access, parent)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)

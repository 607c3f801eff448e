"""Namespaces of one program (Linux): its own processes, network and mounts, all of them read-only.

They do what bubblewrap does, where the kernel lets users have namespaces, and need no privileges.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

_NEW_USER, _NEW_NET, _NEW_PID = 0x10000000, 0x40000000, 0x20000000  # flags of unshare(2)
_NEW_MOUNTS, _NEW_IPC = 0x00020000, 0x08000000
_MOUNT_SETATTR, _CAPSET = 442, {"x86_64": 126, "aarch64": 91}  # syscall numbers
_HERE, _RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _PRIVATE = 1, 2, 4, 8, 1 << 18  # of a mount
_CAPABILITIES_VERSION = 0x20080522  # version 3: two words of each set
_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)


class Namespaces(IntEnum):
    """Namespaces that a process could enter."""

    NONE = 0
    PROCESSES = 1  # and the network, unless it is allowed
    FILES = 2  # also mounts, all of them read-only
    VIEW = 3  # also a /proc that shows no other processes


class _MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_ns")]


def enter_namespaces(folder: Path, size: int, *, deny_network: bool) -> Namespaces:
    """Leave the processes, mounts and, with `deny_network`, the network of this machine.

    Processes that this one starts from now on are in the new namespace; the first one must call
    `mount_processes`, and all end with it. `folder` gets its own file system of `size` bytes.
    """
    if sys.platform != "linux":
        return Namespaces.NONE
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    network = _NEW_NET if deny_network else 0
    if libc.unshare(_NEW_USER | _NEW_PID | _NEW_MOUNTS | _NEW_IPC | network) != 0:
        return Namespaces.NONE
    with suppress(OSError):
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    attributes = _MountAttributes(_READ_ONLY | _NO_SUID, 0, _PRIVATE, 0)
    pointer, length = ctypes.byref(attributes), ctypes.sizeof(attributes)
    if libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, pointer, length) != 0:
        return Namespaces.PROCESSES
    place, options = os.fsencode(folder), f"size={max(size, 1)},mode=700".encode()
    if libc.mount(b"tmpfs", place, b"tmpfs", _NO_SUID | _NO_DEVICES, options) != 0:
        return Namespaces.PROCESSES
    os.chdir(folder)
    return Namespaces.FILES


def mount_processes() -> bool:
    """Let /proc show the processes of this namespace only; return True if the kernel allows it.

    It does not in containers that hide parts of /proc.
    """
    flags = _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC
    return ctypes.CDLL(None).mount(b"proc", b"/proc", b"proc", flags, None) == 0


def probe() -> Namespaces:
    """Return what a program can enter here. This process is then of no other use."""
    found = enter_namespaces(Path("/"), 1, deny_network=True)
    if found < Namespaces.FILES:
        return found
    if (child := os.fork()) == 0:
        os._exit(not mount_processes())
    return found if os.waitpid(child, 0)[1] else Namespaces.VIEW


def drop_capabilities() -> None:
    """Give up all capabilities, for good: no program that this process executes gains one."""
    if sys.platform != "linux" or (number := _CAPSET.get(os.uname().machine)) is None:
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    libc.syscall(number, header, (ctypes.c_uint32 * 6)())

"""Namespaces of one program (Linux): separate processes, network and read-only mounts.

They do what bubblewrap does, where the kernel lets users have namespaces, and need no privileges.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

# Flags of unshare(2).
_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_NEW_PID = 0x20000000
_NEW_MOUNTS = 0x00020000
_NEW_IPC = 0x08000000
# Numbers of system calls.
_MOUNT_SETATTR = 442
_CAPSET = {"x86_64": 126, "aarch64": 91}
# Arguments of mount_setattr(2).
_HERE = -100
_RECURSIVE = 0x8000
# Attributes of a mount.
_READ_ONLY = 1
_NO_SUID = 2
_NO_DEVICES = 4
_NO_EXEC = 8
_PRIVATE = 1 << 18
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
    `mount_processes`, and all end with it. `folder` gets a file system of `size` bytes.
    """
    if sys.platform != "linux":
        return Namespaces.NONE
    libc = ctypes.CDLL(None)
    user = os.getuid()
    group = os.getgid()
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
    pointer = ctypes.byref(attributes)
    length = ctypes.sizeof(attributes)
    if libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, pointer, length) != 0:
        return Namespaces.PROCESSES
    place = os.fsencode(folder)
    options = f"size={max(size, 1)},mode=700".encode()
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
    if os.waitpid(child, 0)[1]:
        return found
    return Namespaces.VIEW


def drop_capabilities() -> None:
    """Give up all capabilities, for good: no program that this process executes gains one."""
    if sys.platform != "linux" or (number := _CAPSET.get(os.uname().machine)) is None:
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    libc.syscall(number, header, (ctypes.c_uint32 * 6)())

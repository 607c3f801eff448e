"""Isolation of code that a model has written: what this machine has for it (Linux).

bubblewrap makes all files read-only and hides processes, where it is installed and the kernel
allows its namespaces. Otherwise rlctl enters namespaces itself (`namespaces`); where they are not
allowed either, as in many containers, Landlock and a filter of system calls remain. None of them
needs privileges.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache

from rlctl.runtime.sandbox import process_limits
from rlctl.runtime.sandbox.namespaces import Namespaces
from rlctl.runtime.sandbox.system_calls import can_filter

_PROBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlctl.runtime.sandbox.namespaces import probe; print(probe().value)"
)


def bubblewrap(folder: str, file_size: int, *, network: bool) -> list[str]:
    """Return the command in front of a program that may write `file_size` bytes to `folder`.

    The program is the first process of its namespace: all others end with it.
    """
    network_options = ["--share-net"] if network else []
    return [
        *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--proc", "/proc", "--size", str(max(file_size, 1)), "--tmpfs", folder),
        *("--chdir", folder, "--unshare-all", "--unshare-user"),
        *("--disable-userns", "--cap-drop", "ALL", "--as-pid-1"),
        *("--die-with-parent", *network_options, "--"),
    ]


@cache
def has_bubblewrap() -> bool:
    """Return True if bubblewrap is installed and works here."""
    if shutil.which("bwrap") is None:
        return False
    command = [*bubblewrap("/tmp", 2**20, network=False), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@cache
def own_namespaces() -> Namespaces:
    """Return the namespaces that a process of rlctl can enter here."""
    command = [sys.executable, "-c", _PROBE, json.dumps(sys.path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        return Namespaces.NONE
    return Namespaces(int(found))


def missing_isolation() -> str | None:
    """Return what programs of the python tool are not kept from here; None: nothing."""
    namespaces = Namespaces.VIEW if has_bubblewrap() else own_namespaces()
    allowed: list[str] = []
    if namespaces < Namespaces.FILES:
        if not process_limits.protects_files():
            allowed += ["write to, change and delete your files"]
        else:
            if not process_limits.protects_sizes():
                allowed += ["empty your files"]
            if not can_filter():
                allowed += ["change permissions, times and attributes of your files"]
        allowed += ["fill the disk with their own files"]
    if namespaces < Namespaces.VIEW:
        allowed += ["see your other processes"]
    if namespaces < Namespaces.PROCESSES:
        if not process_limits.protects_processes():
            allowed += ["send signals to them"]
        if not process_limits.protects_files():
            allowed += ["read and change their memory"]
    if not can_filter():
        allowed += ["use Unix sockets and memory that no limit counts"]
    if not allowed:
        return None
    if namespaces == Namespaces.VIEW:
        cause = "there is no filter of system calls for this machine"
    else:
        cause = "user namespaces are not allowed here"
        if namespaces:
            cause += ", or not all"
    text = f"{cause}: programs of the python tool can {', '.join(allowed)}"
    if shutil.which("bwrap") is None and (advice := bubblewrap_advice()):
        text += f" ({advice} may help)"
    return text


def isolation() -> str:
    """Return the name of what isolates programs of the python tool here."""
    if has_bubblewrap():
        return "bubblewrap"
    if own_namespaces():
        return "namespaces"
    return "Landlock and a filter of system calls"


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
    if found is None:
        return None
    return f"{found} bubblewrap"

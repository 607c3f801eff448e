"""Take from Python what it lacks on macOS, in every process that has this folder on its path.

Python 3.11 and 3.12 have no `os.waitid` there (added in 3.13), no Python has `sched_getaffinity`,
and the kernel refuses some limits of memory. It does not stand for Apple's kernel or wheels.
"""

import os
import resource

for name in ("waitid", "sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)

_set = resource.setrlimit


def setrlimit(kind: int, bounds: tuple[int, int]) -> None:
    if kind == resource.RLIMIT_DATA:
        raise ValueError("current limit exceeds maximum limit")
    _set(kind, bounds)


resource.setrlimit = setrlimit

"""Errors of rlctl for exceptions of the system, of failed allocations and of users' code."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from rlctl.errors import (
    FULL_DISK,
    NO_ACCESS,
    ConfigError,
    DeviceMemoryError,
    ResourceError,
    RlctlError,
    Terminated,
    TimeUp,
)

# Texts of torch's and oneDNN's RuntimeErrors for an allocation of host memory that fails.
_CPU_OOM = (
    "DefaultCPUAllocator: ",  # cannot allocate memory, or has not enough
    "could not create a primitive",
    "could not create a memory",
    "could not create a scratchpad",
    "std::bad_alloc",
)


def as_rlctl_error(error: BaseException) -> RlctlError | None:
    """Return an RlctlError as it is, and one for errors of the file system and of users' code.

    A failed allocation is a DeviceMemoryError. Those of the file system, a ResourceError, are a
    full disk or quota, missing permissions, a read-only disk and a name that is too long. Returns
    None for any other exception.
    """
    if isinstance(error, OSError) and error.errno in NO_ACCESS:
        return ResourceError(
            f"the operating system refused access: {error.strerror}",
            where=str(error.filename) if error.filename is not None else None,
            hint="check the owner, the permissions and the length of the name, or use another "
            "folder: --root DIR, trainer.run_dir=DIR",
        )
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return ConfigError(error.strerror or "a loop of links", where=error.filename)
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return ResourceError(
            f"cannot write: {error.strerror}",
            where=error.filename,
            hint="`rlctl doctor` shows the free space",
        )
    if type(error).__name__ == "OutOfMemoryError" or is_cpu_oom(error):
        return DeviceMemoryError(
            f"out of memory: {(str(error) or type(error).__name__).partition(chr(10))[0]}",
            hint="`rlctl fit` finds settings that fit; `--dry-run` prints the memory of each role",
        )
    return error if isinstance(error, RlctlError) else _error_of_users_code(error)


@contextmanager
def raising_rlctl_errors() -> Iterator[None]:
    """Raise the `as_rlctl_error` of an exception of the block, if it has one, in its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        known = as_rlctl_error(error)
        if known is None or known is error:
            raise
        raise known from error


def is_cpu_oom(error: BaseException) -> bool:
    """Return True for a failed allocation of host memory by Python, torch, oneDNN or C++."""
    has_text = any(text in str(error) for text in _CPU_OOM)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_text)


def _error_of_users_code(error: BaseException) -> ConfigError | None:
    """Return the error of an exception that users' code raised, else None."""
    if isinstance(error, KeyboardInterrupt | Terminated | TimeUp):
        return None
    if isinstance(error, SystemExit) and Terminated.latest is not None:
        return None
    from rlctl.code_places import plugin_packages, users_place

    place = users_place(error, plugin_packages)
    return None if place is None else raised_by_users_code(error, place)


def raised_by_users_code(error: BaseException, place: str) -> ConfigError:
    """Return the error of an exception in users' code at `place`, file:line."""
    return ConfigError(
        f"your code raised {type(error).__name__}: {error}",
        where=place,
        hint="`rlctl --debug …` prints the traceback",
    )

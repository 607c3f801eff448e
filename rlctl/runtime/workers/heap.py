"""Settings of the C library's heap for processes that compute on a CPU."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt in glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
_KEPT, _PAD = 2**30, 2**26  # bytes


def keep_freed_memory() -> None:
    """Let the heap keep up to 1 GiB of freed memory, also that of large tensors.

    By default glibc returns the memory of every tensor above 32 MiB to the kernel, which then has
    to clear the pages of the next one. No-op with another C library, and if the environment has
    settings of its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    given = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if mallopt is None or given:
        return
    mallopt(MMAP_THRESHOLD, _KEPT)
    mallopt(TRIM_THRESHOLD, _KEPT)
    mallopt(TOP_PAD, _PAD)

"""Settings of the allocators of a process."""

from __future__ import annotations

import ctypes
import os

import torch

# Parameters of mallopt in glibc's malloc.h.
TRIM_THRESHOLD = -1
TOP_PAD = -2
MMAP_THRESHOLD = -3
_KEPT = 2**30  # bytes
_PAD = 2**26  # bytes


def keep_freed_memory() -> None:
    """Let the heap keep up to 1 GiB of freed memory, also that of large tensors.

    By default glibc returns the memory of every tensor above 32 MiB to the kernel, which then has
    to clear the pages of the next one. No-op with another C library, and if the environment has
    such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    given = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if mallopt is None or given:
        return
    mallopt(MMAP_THRESHOLD, _KEPT)
    mallopt(TRIM_THRESHOLD, _KEPT)
    mallopt(TOP_PAD, _PAD)


_SETTINGS = "expandable_segments:True"
_VARIABLE = "PYTORCH_ALLOC_CONF"
_OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def use_expandable_segments() -> None:
    """Let torch's segments grow, so that micro-batches of ever new sizes leave no gaps.

    Settings in the environment are kept. vLLM has none in the memory that it releases asleep.
    """
    if _VARIABLE in os.environ or _OLD_VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = _SETTINGS
    if torch.cuda.is_initialized():  # with `--inline` the plan has, and torch has read its settings
        torch._C._accelerator_setAllocatorSettings(_SETTINGS)

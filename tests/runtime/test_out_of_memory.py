"""Failed allocations of host memory are out of memory, whichever library reports them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlctl.causes import as_rlctl_error, is_cpu_oom
from rlctl.error_codes import code_of
from rlctl.errors import DeviceMemoryError

_TOO_MANY = 2**62  # bytes, beyond every address space


def onednn() -> None:
    """Fail as oneDNN does under a limit of the address space."""
    raise RuntimeError("could not create a primitive")


def scratchpad() -> None:
    """Fail as oneDNN does where its scratchpad does not fit."""
    raise RuntimeError("could not create a scratchpad")


def tensor() -> None:
    """Allocate a tensor."""
    torch.empty(_TOO_MANY, dtype=torch.int8)


def array() -> None:
    """Allocate an array."""
    np.empty(_TOO_MANY, dtype=np.int8)


def text() -> None:
    """Allocate an object of Python, whose error has no message."""
    bytes(_TOO_MANY)


@pytest.mark.parametrize("allocate", [onednn, scratchpad, tensor, array, text])
def test_a_failed_allocation_is_out_of_memory(allocate: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_cpu_oom(caught.value)
    error = as_rlctl_error(caught.value)
    assert isinstance(error, DeviceMemoryError)
    message = error.problems[0].message
    assert message.partition(": ")[2]
    assert (error.exit_code, code_of(message, error)) == (7, "E-OOM")


def test_other_errors_of_libraries_are_not() -> None:
    assert not is_cpu_oom(RuntimeError("could not create a file"))
    assert not is_cpu_oom(ValueError("could not create a primitive"))

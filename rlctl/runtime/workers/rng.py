"""State of all random generators of a process, as plain data.

Almost all randomness is a function of seed and step. The rest (dropout, user functions) draws from
these generators.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of Python, numpy, torch and the GPU, if any; JSON can store it."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().tolist()).hex() if cuda else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state returned by `rng_state`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

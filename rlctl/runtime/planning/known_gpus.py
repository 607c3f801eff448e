"""Devices that a plan may be for: GPUs by name with their memory."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from rlctl.errors import UsageError
from rlctl.runtime.sandbox.worker_settings import usable_memory
from rlctl.suggest import closest

MIB = 2**20
# Memory in MiB as nvidia-smi reports it. The plain name is the common model of several.
GPUS = {
    "T4": 15360,
    "V100": 32768,
    "V100-16GB": 16384,
    "A10": 23028,
    "A10G": 23028,
    "L4": 23034,
    "A40": 46068,
    "L40": 46068,
    "L40S": 46068,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
    "A6000": 49140,
    "RTX6000-Ada": 49140,
    "A100": 81920,
    "A100-40GB": 40960,
    "A800": 81920,
    "H100": 81559,
    "H100-NVL": 95830,
    "H800": 81559,
    "H20": 97871,
    "H200": 143771,
    "GH200": 97871,
    "B200": 183359,
}
_WITHOUT_BF16 = {"T4", "V100", "V100-16GB"}
_SIZE = re.compile(r"([\d.]+)\s*(GiB|GB|G|MiB|MB|M|TB|TiB)?", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 10**9, "g": 2**30, "mib": MIB, "mb": 10**6, "m": MIB}
_UNITS |= {"tb": 10**12, "tib": 2**40}


@dataclass(frozen=True)
class Device:
    """Kind of device and its memory in bytes."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int

    @property
    def has_bf16(self) -> bool | None:
        """True if it computes in bfloat16; None for another device than those of the table."""
        if self.name not in GPUS:
            return None
        return self.name not in _WITHOUT_BF16


def find_device(name: str, memory: str | None = None) -> Device:
    """Return the device `name`: a GPU of the table, `cpu`, or `auto` for that of this machine.

    `memory`, such as `80GB`, replaces its memory. Raises UsageError.
    """
    plain = name.lower().replace(" ", "").replace("_", "-")
    plain = plain.removeprefix("nvidia-").removeprefix("nvidia")
    known = {name.lower(): name for name in GPUS}
    size = None if memory is None else parse_size(memory)
    if plain == "auto":
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            return Device(found.name, "cuda", size or found.total_memory)
        if size is not None:
            return Device(f"a GPU of {memory}", "cuda", size)
        plain = "cpu"
    if plain == "cpu":
        return Device("cpu", "cpu", size or usable_memory())
    if plain not in known:
        near = closest(plain, known)
        raise UsageError(
            f"unknown device {name!r}",
            hint=f"{', '.join(GPUS)}, cpu, auto; or --memory 80GB for any other GPU",
            fix=(name, known[near]) if near else None,
        )
    return Device(known[plain], "cuda", size or GPUS[known[plain]] * MIB)


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `80GB`, `24GiB` or `40000MB`. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        with suppress(ValueError):
            size = int(float(match[1]) * _UNITS[(match[2] or "GB").lower()])
    if size < 100 * MIB:
        raise UsageError(f"{text!r} is not a memory size", where="--memory", hint="--memory 80GB")
    return size

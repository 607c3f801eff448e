"""Devices of this machine that the queue hands out, who uses them, and which entries start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from rlctl.cores import allowed_cores
from rlctl.plugins.console import nvidia_smi
from rlctl.plugins.console.queue.queue_file import Entry
from rlctl.text import plural

_COMMANDS = {"train", "resume", "sweep", "eval", "generate"}


@dataclass(frozen=True)
class Choice:
    """Devices on which a waiting entry starts now, or None and the reason why it waits."""

    entry: Entry
    devices: Sequence[str] | None
    reason: str = ""


def choose(waiting: Sequence[Entry], running: Sequence[Entry]) -> list[Choice]:
    """Return for each waiting entry on which devices it starts, or why it does not.

    One that does not fit yet keeps what it could use from those behind it, so that it does not wait
    for ever.
    """
    devices, users = _machine({entry.order.kind for entry in waiting}, running)
    choices = list[Choice]()
    for entry in waiting:
        order = entry.order
        usable = devices[order.kind] if order.devices is None else order.devices
        wanted = len(usable) if order.number is None else order.number
        free = [device for device in usable if device not in users]
        chosen = (usable if order.now else free)[:wanted]
        if 0 < wanted == len(chosen):
            choices.append(Choice(entry, chosen))
            users |= dict.fromkeys(chosen, f"entry {entry.id}")
            continue
        choices.append(Choice(entry, None, _reason(order.kind, wanted, free, usable, users)))
        if wanted <= len(usable):  # else it never starts, and keeps nothing free
            users |= dict.fromkeys(free, f"entry {entry.id} (before it)")
    return choices


def _machine(
    kinds: Collection[str], running: Sequence[Entry]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return devices by kind, as `GPU 0` or `core 0`, and the users of those that are not free."""
    devices: dict[str, list[str]] = {}
    users: dict[str, str] = {}
    if "core" in kinds:
        devices["core"] = [f"core {number}" for number in _cores_of(psutil.Process())]
        known = {entry.process.pid for entry in running if entry.process is not None}
        for pid, cores in other_runs(known):
            names = [f"core {number}" for number in cores]
            users |= dict.fromkeys(names, f"process {pid}")
    if "GPU" in kinds:
        uuids = {uuid: index for index, uuid in nvidia_smi.query("gpu=index,uuid")}
        devices["GPU"] = [f"GPU {index}" for index in uuids.values()]
        for uuid, pid in nvidia_smi.query("compute-apps=gpu_uuid,pid"):
            if uuid in uuids:
                users[f"GPU {uuids[uuid]}"] = f"process {pid}"
    for entry in running:
        users |= dict.fromkeys(entry.used, f"entry {entry.id}")
    return devices, users


def _reason(
    kind: str, wanted: int, free: Sequence[str], usable: Sequence[str], users: Mapping[str, str]
) -> str:
    """Return why an entry waits, such as `needs 2 GPUs, 1 is free: process 71 uses GPU 1`."""
    if wanted > len(usable) or not wanted:
        return f"needs {plural(max(1, wanted), kind)}, and this machine has {len(usable)}"
    by_user: dict[str, list[str]] = {}
    for device in usable:
        if device in users:
            by_user.setdefault(users[device], []).append(device.split()[-1])
    uses: list[str] = []
    for user, numbers in by_user.items():
        noun = kind if len(numbers) == 1 else f"{kind}s"
        uses.append(f"{user} has {noun} {' '.join(numbers)}")
    return f"needs {plural(wanted, kind)}, {len(free)} free: {', '.join(uses)}"


def _cores_of(process: psutil.Process) -> list[int]:
    """Return the numbers of the cores that a process may use; macOS restricts none."""
    affinity = getattr(process, "cpu_affinity", None)
    return list(range(allowed_cores())) if affinity is None else affinity()


def other_runs(known: Collection[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield process and cores of each `rlctl train` and the like whose process is not `known`."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        at = [index for index, word in enumerate(words[:5]) if word.endswith("rlctl")]
        if not at or process.pid in known or not _COMMANDS & {*words[at[0] + 1 : at[0] + 2]}:
            continue
        if any(word.startswith(("--dry-run", "--address")) for word in words):
            continue
        with suppress(psutil.Error):
            yield process.pid, _cores_of(process)

"""Energy and cost of runs: the listener `trainer.energy`, and the fields of runs made of it.

Counters of the hardware are read each minute, of the machine that drives the run: NVML of the GPUs
that the run may use, and RAPL of the processors and their memory, with all programs on them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rlctl.files import read_record, write_text
from rlctl.recipes import schema
from rlctl.runs.run import Run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.listeners import Listener

LOG = logging.getLogger(__name__)

FILE = "energy.json"  # joules by counter, of all attempts
POWERCAP = Path("/sys/class/powercap")
DRIVER = Path("/dev/nvidiactl")
EVERY_S = 60.0  # the counter of a processor turns over after some minutes
_CLOSE_S = 5.0
_JOULES_PER_KWH = 3.6e6


@dataclass
class Counter:
    """Counter of energy: `read` returns joules; after `turn` joules it starts again at 0."""

    name: str
    read: Callable[[], float]
    turn: float | None = None
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.read()

    def advance(self) -> float:
        """Return the joules since the last call."""
        now = self.read()
        used = now - self.last
        self.last = now
        if used < 0:
            used += self.turn or -used
        return used


def processors(folder: Path) -> Iterator[Counter]:
    """Yield the counters of processors and memory; many systems let only root read them."""
    for zone in sorted(folder.glob("intel-rapl*:*")):
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if not name.startswith(("package", "dram")):  # others are parts of these, or the sum
                continue
            turn = int((zone / "max_energy_range_uj").read_text()) / 1e6
            file = zone / "energy_uj"
            yield Counter(f"rapl/{zone.name}", lambda file=file: int(file.read_text()) / 1e6, turn)


def gpus() -> Iterator[Counter]:
    """Yield the counters of the GPUs that this process may use; none without NVML."""
    if find_spec("pynvml") is None:
        if DRIVER.exists():
            LOG.warning("the energy of GPUs is not counted: pip install 'rlctl[energy]'")
        return
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(nvml.nvmlDeviceGetCount()))
        for name in names if visible is None else visible.split(","):
            if name.strip().isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name.strip())
            read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            yield Counter(f"nvml/{name.strip()}", lambda read=read: read() / 1e3)
    except nvml.NVMLError as error:
        LOG.info("the energy of GPUs is not counted: %s", error)


class Energy(Listener):
    """Listener that counts the energy of the run's attempts."""

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        super().__init__(run, config)
        self.joules = read_joules(run.path)
        self.counters = [*processors(POWERCAP), *gpus()]
        if not self.counters:
            LOG.warning("trainer.energy: this machine has no counter of energy that can be read")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="energy", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        ends = False
        while self.counters and not ends:
            ends = self._ended.wait(EVERY_S)
            for counter in self.counters:
                with suppress(Exception):  # a GPU may be lost
                    before = self.joules.get(counter.name, 0.0)
                    self.joules[counter.name] = before + counter.advance()
            with suppress(OSError):
                write_text(self.run.path / FILE, json.dumps(self.joules) + "\n")

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_CLOSE_S)


def read_joules(folder: Path) -> dict[str, float]:
    """Return the joules of a run by counter; empty if none were counted."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        found = json.loads(read_record(folder / FILE))
        return {str(name): float(joules) for name, joules in found.items()}
    return {}


def energy_kwh(run: Run) -> float | None:
    """Return the energy of a run in kWh, None if it was not counted."""
    if not (joules := read_joules(run.path)):
        return None
    return round(sum(joules.values()) / _JOULES_PER_KWH, 6)


def cost(run: Run) -> float | None:
    """Return the price of a run's hours, None without `trainer.price_per_hour`."""
    price = run.setting("trainer.price_per_hour")
    seconds = run.seconds
    if not isinstance(price, int | float) or seconds is None:
        return None
    return round(price * seconds / 3600, 4)

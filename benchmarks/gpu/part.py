"""Process of one part of the suite: `python -m benchmarks.gpu.part NAME ROWS DEVICE SECONDS`.

NAME is a module of this package, or the full name of another one.
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.recorder import Recorder, Settings


def main() -> None:
    """Measure one part, and append its rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("rows", type=Path)
    parser.add_argument("device")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    with given.rows.open("a") as file:
        recorder = Recorder(given.part, file, deadline)
        module = given.part if "." in given.part else f"benchmarks.gpu.{given.part}"
        measure = import_module(module).measure
        measure(Settings(given.device, given.tiny), recorder)


if __name__ == "__main__":
    main()

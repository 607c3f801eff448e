"""Ladder of checks on a GPU: what works, then how fast. Runs from a checkout.

    python -m benchmarks.gpu [--device cuda] [--minutes 3] [--rungs machine attention]
    python -m benchmarks.gpu --device cpu --tiny

It needs Python 3.11 or later, torch 2.11 or later, transformers and the packages that `python -m
benchmarks.gpu.wheels FOLDER` collects for a machine without a registry. Each rung has a process
of its own and at most `--minutes`, or the longer time that it states. The ladder stops at the first
one that fails, unless told to `--keep-going`. Rungs whose packages are missing are skipped. Prints
tables and writes results.json, results.md and a log per rung to the folder `--out`. The exit code
is 1 if a rung failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import machine, report, rungs
from benchmarks.gpu.entry_points import python_path
from benchmarks.gpu.recorder import Settings

_RUNGS = {rung.name: rung for rung in rungs.RUNGS}


def main() -> int:
    """Climb the ladder and report; return the exit code."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    # A forked process cannot use CUDA if torch counted GPUs by CUDA before.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = python_path(Path(folder))
        # Rungs are processes of multiprocessing, which have the path of this one.
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        rows = climb([_RUNGS[name] for name in given.rungs], given)
    states = [row for row in rows if row["table"] == report.LADDER]
    for state in dict.fromkeys(row["state"] for row in states):
        print(f"{state}: {', '.join(row['name'] for row in states if row['state'] == state)}")
    left = given.rungs[len(states) :]
    print(*([f"not run: {', '.join(left)}"] if left else []), f"tables: {given.out}/results.md")
    return int(any(row["state"] == "failed" for row in states))


def climb(chosen: list[rungs.Rung], given: argparse.Namespace) -> list[report.Row]:
    """Run rungs up to the first one that fails; return all rows, with one for each rung tried."""
    rows: list[report.Row] = []
    command = machine.command()
    print(command, flush=True)
    for rung in chosen:
        begin, found, state = time.monotonic(), [], "works"
        if rung.missing:
            state = f"skipped without {', '.join(rung.missing)}"
        else:
            print(f"\n{rung.name}", flush=True)
            settings = Settings(given.device, given.tiny)
            minutes = max(given.minutes, 0 if given.tiny else rung.minutes)
            found = rungs.run(rung, settings, 60 * minutes, given.out)
            state = "failed" if report.has_failed(found) else state
            print(report.text(found), flush=True)
            if state == "failed":
                print(rungs.end_of_log(rung, given.out), flush=True)
        took = time.monotonic() - begin
        ladder = {"rung": rung.name, "table": report.LADDER, "name": rung.name}
        rows += [*found, ladder | {"state": state, "seconds": took}]
        print(f"{rung.name}: {state}, {took:.0f} s", flush=True)
        (given.out / "results.json").write_text(json.dumps(rows, indent=1))
        (given.out / "results.md").write_text(report.markdown(command, rows))
        if state == "failed" and not given.keep_going:
            break
    return rows


def _arguments() -> argparse.Namespace:
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--minutes", type=float, default=3.0, help="least limit of each rung")
    parser.add_argument("--rungs", nargs="+", choices=_RUNGS, default=list(_RUNGS))
    parser.add_argument("--keep-going", action="store_true", help="also after a rung that failed")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

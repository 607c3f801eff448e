"""GPU suite: correctness first, then speed. Runs from a checkout, without Ray or vLLM.

    python -m benchmarks.gpu [--device cuda] [--minutes 9] [--parts correctness steps]
    python -m benchmarks.gpu --device cpu --tiny

It needs Python 3.11 or later, torch 2.11 or later, transformers and the packages that `python -m
benchmarks.gpu.wheels FOLDER` collects for a machine without a registry. Each part runs in a process
of its own with a deadline; what cannot run says why. Prints tables and writes results.json and
results.md to the folder `--out`. The exit code is 1 if a check does not hold or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import machine, report
from benchmarks.gpu.entry_points import python_path
from benchmarks.gpu.recorder import NOTE, read_rows

# Shares of the time. A part that ends early leaves its rest to the later ones.
PARTS = {
    "correctness": 70.0,
    "kernels": 30.0,
    "generation": 70.0,
    "steps": 110.0,
    "throughput": 170.0,
    "curve": 60.0,
    "link": 20.0,
    "memory": 40.0,
}
GRACE_S = 5.0  # after its deadline, before a part is killed


def main() -> int:
    """Run the parts and report; return the exit code."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(given.device)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    end = time.monotonic() + 60 * given.minutes
    rows: list[report.Row] = []
    failed: list[str] = []
    for number, part in enumerate(given.parts):
        share = PARTS[part] / sum(PARTS[each] for each in given.parts[number:])
        left = max(0.0, end - time.monotonic())
        print(f"\n{part}: at most {share * left:.0f} s", flush=True)
        begin = time.monotonic()
        found = run_part(part, given.device, given.tiny, share * left, given.out)
        rows += found
        failed += [part] * any(row.get("failed", False) for row in found)
        print(report.text(found), f"\n{time.monotonic() - begin:.0f} s", sep="", flush=True)
        (given.out / "results.json").write_text(
            json.dumps({"facts": facts, "rows": rows}, indent=1)
        )
        (given.out / "results.md").write_text(report.markdown(facts, rows))
    wrong = report.failures(rows)
    print(f"\n{len(wrong)} checks do not hold, {len(failed)} parts failed: {given.out}/results.md")
    return 1 if wrong or failed else 0


def _arguments() -> argparse.Namespace:
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    return parser.parse_args()


def run_part(part: str, device: str, tiny: bool, seconds: float, out: Path) -> list[report.Row]:
    """Run a part in its process; return its rows, also those of a part that ends early.

    A part that fails or exceeds its time adds a note with `failed`; its output is in `out`.
    """
    rows_file, log = out / f"{part}.jsonl", out / f"{part}.log"
    rows_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part", part, str(rows_file), device]
    command += [str(seconds), *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        environment = os.environ | {"PYTHONPATH": python_path(Path(folder))}
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds + GRACE_S)
            why = None if code == 0 else f"exit code {code}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            why = f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    rows = read_rows(rows_file)
    if why is not None:
        rows.append({"part": part, "table": NOTE, "what": "rest", "why": why, "failed": True})
    return [*rows]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


if __name__ == "__main__":
    raise SystemExit(main())

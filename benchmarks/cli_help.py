"""Time of `rlctl --help` relative to the help of a minimal Typer app. Target: at most 1.5.

    python benchmarks/cli_help.py [ROUNDS]

Both commands alternate, so that a busy machine slows both; the ratio is that of the medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import record

BARE = """
import typer
app = typer.Typer()

@app.command()
def hello(name: str):
    "Say hello."

@app.command()
def goodbye(name: str):
    "Say goodbye."

app()
"""


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of a process; raise if it fails."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int) -> tuple[float, float]:
    """Return the median seconds of (bare, rlctl) over `rounds` alternations, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        bare, rlctl = (
            [sys.executable, str(script), "--help"],
            [sys.executable, "-m", "rlctl", "--help"],
        )
        times = [(seconds(bare), seconds(rlctl)) for _ in range(rounds + 1)][1:]
    return statistics.median(pair[0] for pair in times), statistics.median(
        pair[1] for pair in times
    )


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    bare, rlctl = measure(rounds)
    print(f"bare typer --help  {bare * 1e3:6.0f} ms")
    print(f"rlctl --help       {rlctl * 1e3:6.0f} ms")
    record("rlctl --help over typer's", rlctl / bare, "lower")
    print(f"ratio              {rlctl / bare:6.2f}  (target: at most 1.5)")


if __name__ == "__main__":
    main()

"""Lines of rlctl that commands load: the measure of the core's size, which may only fall."""

import subprocess
import sys
from pathlib import Path

import pytest

# The first is a text run with the engine `hf`, in one process, without tools, images or judges.
MOST_LINES = {
    "train ppo --inline trainer.total_training_steps=1": 33_544,
    "--help": 1_384,
    "runs": 5_494,
    "sweep ppo --dry-run actor_rollout_ref.actor.optim.lr=1e-4,1e-3": 32_350,
}

COUNT = """
import atexit, sys

def report():
    names = [name for name in sys.modules if name.partition(".")[0] == "rlctl"]
    files = {getattr(sys.modules[name], "__file__", None) for name in names} - {None}
    print("loaded lines:", sum(open(file, "rb").read().count(b"\\n") for file in files))

atexit.register(report)
from rlctl.__main__ import main
main()
"""


@pytest.mark.parametrize("command", MOST_LINES)
def test_a_command_loads_no_more_lines_than_before(command: str, tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", COUNT, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (counted,) = [line for line in ended.stdout.splitlines() if line.startswith("loaded lines:")]
    assert int(counted.split()[-1]) <= MOST_LINES[command]

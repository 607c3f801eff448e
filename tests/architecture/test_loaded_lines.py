"""Lines of rlctl that a plain run loads: the measure of the core's size, which may only fall."""

import subprocess
import sys
from pathlib import Path

# A text run with the engine `hf`, in one process, without tools, images, judges or vLLM.
PLAIN_RUN = 53_720

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


def test_a_plain_run_loads_no_more_lines_than_before(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", COUNT, *"train ppo --inline trainer.total_training_steps=1".split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (counted,) = [line for line in ended.stdout.splitlines() if line.startswith("loaded lines:")]
    assert int(counted.split()[-1]) <= PLAIN_RUN

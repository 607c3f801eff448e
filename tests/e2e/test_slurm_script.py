"""The batch script of docs/machines.md, with stand-ins for SLURM, Ray and rlctl."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
STAND_INS = {
    "srun": 'echo "$@" >>"$HOME/srun"',
    "ray": 'mkdir -p "$HOME/.ray"; echo secret | tee "$HOME/.ray/auth_token"',
    "python": """case "$2" in
*get_node_ip_address*) echo 10.0.0.1:6000 ;;
*) wc -l <"$HOME/srun" ;;
esac""",
    "rlctl": """echo "$RAY_ADDRESS $*" >"$HOME/rlctl.txt"
trap 'exit 143' TERM
[ "$CODE" = wait ] || exit "$CODE"
while true; do sleep 0.05; done""",
}


def _script() -> str:
    found = re.search(r"```bash\n(#!/bin/bash\n#SBATCH .*?)```", PAGE.read_text(), re.DOTALL)
    assert found, "sbatch accepts only a file whose first line is #!"
    return found[1]


def _start(home: Path, code: str, nodes: int = 2) -> subprocess.Popen[str]:
    """Start the script in `home`, with stand-ins; that of rlctl exits with `code`, or waits."""
    programs = home / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    activate = home / "rlctl" / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    (home / "train.sbatch").write_text(_script())
    slurm = {"SLURMD_NODENAME": "n1", "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "1"}
    return subprocess.Popen(
        ["bash", "train.sbatch"],
        cwd=home,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "CODE": code} | slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("nodes", "code"), [(1, 0), (2, 0), (2, 3)])
def test_script_starts_ray_and_exits_with_the_code_of_rlctl(tmp_path, nodes, code):
    job = _start(tmp_path, str(code), nodes)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, output) == (code, "")  # the token is not in the job's log
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    steps = (tmp_path / "srun").read_text().splitlines()
    assert len(steps) == nodes
    assert "ray start --head --port=6000" in steps[0]
    assert all("--exclude=n1" in step and "--address=10.0.0.1:6000" in step for step in steps[1:])
    words = (tmp_path / "rlctl.txt").read_text().split()
    assert words[0] == "10.0.0.1:6000"
    assert f"trainer.nnodes={nodes}" in words


def test_signal_before_the_time_limit_reaches_rlctl(tmp_path):
    job = _start(tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "rlctl.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # both traps are set
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 143

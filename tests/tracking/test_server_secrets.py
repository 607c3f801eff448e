"""Planted secrets are in nothing that the servers of SwanLab and W&B receive."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.real import in_a_home
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

pytestmark = pytest.mark.soak

SECRETS = {
    "api key": "Qkey-11aa11",
    "git remote": "Qgit-13ff13",
    "description": "sk-" + "q7" * 20,
    "environment": "Qenv-33cc33",
    "URL": "Qpwd-66ff66",
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0
"""


class Tee:
    """Input of a server that keeps what was read."""

    def __init__(self, file: Any, bodies: list[bytes]) -> None:
        self.file = file
        self.bodies = bodies

    def read(self, size: int = -1) -> bytes:
        """Read and keep a body."""
        data = self.file.read(size)
        self.bodies.append(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_servers_receive_numbers_of_the_system_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[bytes] = []
    original = BaseHTTPRequestHandler.setup

    def setup(handler: Any) -> None:
        original(handler)
        handler.rfile = Tee(handler.rfile, bodies)

    monkeypatch.setattr(BaseHTTPRequestHandler, "setup", setup)
    (tmp_path / "reward.py").write_text(REWARD)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    remote = f"https://me:{SECRETS['git remote']}@example.com/x.git"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    kwargs = "+reward.custom_reward_function.reward_kwargs"
    with swanlab_server() as (swan, experiments), wandb_server() as (address, _):
        variables = in_a_home(tmp_path) | {
            **{"SWANLAB_API_HOST": swan, "SWANLAB_WEB_HOST": swan, "WANDB_BASE_URL": address},
            **{"SWANLAB_API_KEY": "k" * 21, "WANDB_API_KEY": "k" * 40},
            **{"OWN_KEY": SECRETS["environment"], "OMP_NUM_THREADS": "1"},
        }
        settings = [
            *("trainer.total_training_steps=2", "trainer.save_freq=-1", "data.val_max_samples=4"),
            *("trainer.tracking.system_s=0.2", "reward.num_processes=1"),
            "reward.custom_reward_function.path=reward.py",
            f"{kwargs}.api_key={SECRETS['api key']}",
            f"{kwargs}.url='https://me:{SECRETS['URL']}@h/x'",
            f"{kwargs}.endpoint=${{oc.env:OWN_KEY}}",
            f"trainer.tracking.description='with {SECRETS['description']}'",
        ]
        command = ["train", "grpo", "--inline", "--name", "one", "-l", "swanlab", "-l", "wandb"]
        done = subprocess.run(
            [sys.executable, "-m", "rlctl", *command, *settings],
            cwd=tmp_path,
            env=variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    received = b"\n".join(bodies)
    assert [kind for kind, secret in SECRETS.items() if secret.encode() in received] == []
    assert received.count(b"system/node0/cpu_percent") >= 2  # of both servers
    [experiment] = experiments.values()
    assert len(experiment.curves["system/node0/memory_gib"]) >= 1

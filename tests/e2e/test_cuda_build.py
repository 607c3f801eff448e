"""Commands with torch's build for CUDA, on a machine without a driver. It is downloaded: 3 GB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.entry_points import ROOT
from tests.e2e.command import environment, rlctl
from tests.settings import given

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
]

NODES = ("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return variables with which Python finds the build first."""
    folder = tmp_path_factory.mktemp("torch")
    python = Path(sys.executable)
    number = version("torch").partition("+")[0]
    install = ["pip", "install", "--quiet", "--python", str(python), "--target", str(folder)]
    # A folder of wheels may have a build for CPUs.
    registry = {name: value for name, value in os.environ.items() if "FIND_LINKS" not in name}
    command = [python.with_name("uv"), *install, f"torch=={number}"]
    if subprocess.run(command, env=registry, timeout=1800).returncode:
        pytest.skip("torch's build for CUDA cannot be downloaded here")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(code: str, cuda: Mapping[str, str]) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment() | cuda, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_processes_of_the_ladder_can_use_cuda_after_their_fork(cuda: Mapping[str, str]) -> None:
    code = """
import os
from importlib import import_module
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as benchmarks.gpu does
import benchmarks.gpu.rungs
for module in benchmarks.gpu.rungs.preloaded("cuda"):
    import_module(module)
import torch
child = os.fork()
if child == 0:
    os._exit(torch.cuda._is_in_bad_fork())
print(os.waitpid(child, 0)[1])
"""
    assert run(code, cuda) == "0"


def test_doctor(cuda: Mapping[str, str], tmp_path: Path) -> None:
    found = rlctl("doctor", cwd=tmp_path, more=cuda, process=True).stdout
    assert "torch for CUDA" in found
    assert "no NVIDIA GPU here" in found


@pytest.mark.parametrize(
    ("command", "found"),
    [(["train", "grpo"], "cuda"), (["sweep", "grpo", "trainer.seed=1,2"], "16 CPU, 16 GPU")],
)
def test_dry_run_of_a_run_on_gpus_elsewhere(
    cuda: Mapping[str, str], command: list[str], found: str, tmp_path: Path
) -> None:
    given = [*command, "--dry-run", *NODES, f"trainer.run_dir={tmp_path}"]
    assert found in rlctl(*given, cwd=tmp_path, more=cuda, process=True).stdout


def test_a_run_here_is_refused_a_gpu_and_uses_the_cpu(
    cuda: Mapping[str, str], tmp_path: Path
) -> None:
    command = ["train", "grpo", *given(steps=1, batch=8, mini_batch=8, val=None, runs=tmp_path)]
    refused = rlctl(*command, NODES[0], cwd=tmp_path, more=cuda, process=True, code=7)
    assert "this machine has 0 GPUs" in refused.stderr
    rlctl(*command, cwd=tmp_path, more=cuda, process=True)

"""Lines of rlctl that commands load: the measure of the core's size, which may only fall."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ON_RAY = "train ppo trainer.total_training_steps=1"
WITH_VLLM = f"{ON_RAY} actor_rollout_ref.rollout.name=vllm"
# The first is a text run with the engine `hf`, in one process, without tools, images or judges.
MOST_LINES = {
    "train ppo --inline trainer.total_training_steps=1": 33_451,
    ON_RAY: 35_943,  # of the controller
    WITH_VLLM: 37_195,
    "--help": 1_365,
    "runs": 5_355,
    "sweep ppo --dry-run actor_rollout_ref.actor.optim.lr=1e-4,1e-3": 31_962,
}

MARKS = {
    ON_RAY: [pytest.mark.soak],
    WITH_VLLM: [pytest.mark.extra("vllm"), pytest.mark.soak],
}
# Modules of engines in processes of their own, and of what a model or a setting asks vLLM for.
FEATURES = {
    "data_prep.images",
    "runtime.base.image_processor",
    "runtime.cluster.engine_group",
    "runtime.model.image_attention",
    "runtime.model.routing",
    "runtime.model.vision",
    "runtime.rollout.vllm_engine.adapters",
    "runtime.rollout.vllm_engine.cpu",
    "runtime.rollout.vllm_engine.engine_images",
    "runtime.rollout.vllm_engine.routed_experts",
    "runtime.rollout.weight_group",
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


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=MARKS.get(command, [])) for command in MOST_LINES]
)
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


def test_pools_and_the_class_of_vllm_load_no_feature():
    imported = "rlctl.runtime.planning.ray_pools, rlctl.runtime.rollout.vllm_engine.vllm_in_process"
    code = f"import sys, {imported}; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    ).stdout
    loaded = {name.removeprefix("rlctl.") for name in printed.split()}
    assert not FEATURES & loaded
    assert all(find_spec(f"rlctl.{name}") for name in FEATURES)

"""A Ray cluster of our own is what `ray_kwargs.ray_init` asks for."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import ray

from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.session import ray_session


def test_every_setting_reaches_ray_and_folders_of_killed_runs_are_removed() -> None:
    dead, alive = (Path(tempfile.mkdtemp(prefix="rlctl-ray-", dir="/tmp")) for _ in range(2))
    (dead / "lock").touch()
    held = (alive / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    given = [
        "num_gpus=3",
        "object_store_memory=90000000",
        "runtime_env={env_vars:{RLCTL_TEST_COLOUR:teal,OMP_NUM_THREADS:2}}",
    ]
    init = compose(
        "ppo", [f"ray_kwargs.ray_init.{text}" for text in given]
    ).config.ray_kwargs.ray_init
    tracker = subprocess.Popen(
        ["sleep", "60"]
    )  # W&B has a process of its own, which is told of the end after Ray
    with ray_session(init, 2, 1, 120.0, None):
        assert (dead.exists(), alive.exists()) == (False, True)
        alive.joinpath("lock").unlink()
        alive.rmdir()
        there = ray.cluster_resources()
        assert (there["CPU"], there["GPU"], there["object_store_memory"]) == (2, 3, 90_000_000)
        seen = ray.get(
            ray.remote(
                lambda: [os.environ.get(name) for name in ("RLCTL_TEST_COLOUR", "OMP_NUM_THREADS")]
            ).remote(),
            timeout=600,
        )
        assert seen == ["teal", "2"]
        scratch = Path(ray.get(ray.remote(tempfile.mkdtemp).remote(), timeout=600))
        assert scratch.is_dir()
    assert not scratch.exists(), (
        "what a worker leaves in its temporary folder goes with the session"
    )
    assert tracker.poll() is None, "only what Ray started is ended"
    tracker.kill()
    tracker.wait()

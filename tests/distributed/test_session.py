"""Ray session started by rlctl: settings of `ray_kwargs.ray_init` and cleanup."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import ray

from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.session import ray_session


def test_settings_reach_ray_and_stale_folders_are_removed() -> None:
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
    tracker = subprocess.Popen(["sleep", "60"])  # like the process of W&B, which outlives Ray
    with ray_session(init, 2, 1, 120.0, None):
        assert (dead.exists(), alive.exists()) == (False, True)
        alive.joinpath("lock").unlink()
        alive.rmdir()
        total = ray.cluster_resources()
        assert (total["CPU"], total["GPU"], total["object_store_memory"]) == (2, 3, 90_000_000)
        seen = ray.get(
            ray.remote(
                lambda: [os.environ.get(name) for name in ("RLCTL_TEST_COLOUR", "OMP_NUM_THREADS")]
            ).remote(),
            timeout=600,
        )
        assert seen == ["teal", "2"]
        scratch = Path(ray.get(ray.remote(tempfile.mkdtemp).remote(), timeout=600))
        assert scratch.is_dir()
    assert not scratch.exists(), "temporary files of workers are removed with the session"
    assert tracker.poll() is None, "only processes of Ray are stopped"
    tracker.kill()
    tracker.wait()

"""Soak case of vLLM servers as the engines of a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.command import environment, metrics, rlctl, start, wait_for_steps
from tests.e2e.killed_runs import events
from tests.progress import wait_until

LONG = ["trainer.total_training_steps=80", "trainer.total_epochs=100", "trainer.save_freq=80"]
SLOTS = "ray_kwargs.ray_init.num_cpus=4"  # one for an engine that joins
POOL = ["trainer.placement.rollout=engines", "trainer.placement.pools={engines: 1}", SLOTS]
SERVER = [
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "100000000"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--enable-scale-out", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
    "--worker-extension-cls",
    "rlctl.plugins.bridges.vllm_server_extension.WeightReceiver",
]


def train_on_servers(settings: list[str], folder: Path, *, group: bool = False) -> str | None:
    """Train with a vLLM server, and let a second one replace it; return what is wrong.

    Weights go through a folder. With `group` servers get them in a process group, and the first
    one is killed instead of drained.
    """
    run = folder / "runs" / "quickstart" / "served"
    rollout, options = "actor_rollout_ref.rollout", ("--tensor-parallel-size", "2") * group
    with (
        vllm_server(folder) as (first, server),
        vllm_server(folder, *options) as (second, _),
    ):
        engine = [f"{rollout}.name=vllm_server", f"+{rollout}.engine_kwargs.url={first}"]
        if group:
            engine.append(f"+{rollout}.engine_kwargs.weights_dir={folder}/no-such-folder")
        else:
            engine.append(f"{rollout}.checkpoint_engine.backend=object_store")
        command = ["train", "grpo", *settings, *POOL, *LONG, *engine, "--name", "served"]
        process = start(*command, cwd=folder)
        wait_for_steps(process, run, 3)
        rlctl("engines", "add", "served", "--url", second, cwd=folder)
        if group:
            os.killpg(server.pid, signal.SIGKILL)
        else:
            rlctl("engines", "drain", "served", 0, cwd=folder)
        process.communicate()
    rows, losses = metrics(run)[1:], events(run, "engine_lost")
    largest = max(row["training/rollout_probs_diff_max"] for row in rows)
    if process.returncode or largest > 1e-4 or bool(losses) != group:
        return (
            f"exit code {process.returncode}, |π_engine - π_trainer| up to {largest:.1e}, "
            f"{len(losses)} engines lost"
        )
    return None


@contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield address and process of a vLLM server on the CPU with the model in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", str(port)]
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with (folder / f"server-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--host", "127.0.0.1", *SERVER, *options],
            cwd=folder,
            env=environment() | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ready() -> bool:
        assert process.poll() is None, Path(log.name).read_text(encoding="utf-8")[-3000:]
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
            return False

    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(ready, process.pid, "the vLLM server")
        yield url, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

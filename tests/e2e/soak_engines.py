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
from tests.progress import wait_until

LONG = ["trainer.total_training_steps=80", "trainer.total_epochs=100", "trainer.save_freq=80"]
SLOTS = "ray_kwargs.ray_init.num_cpus=4"  # one for an engine that joins
POOL = ["trainer.placement.rollout=engines", "trainer.placement.pools={engines: 1}", SLOTS]
SERVER = [
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "100000000"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--enable-scale-out", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
    "--worker-extension-cls",
    "rlctl.runtime.rollout.vllm_engine.server_extension.UnpackedWeights",
]


def train_on_servers(settings: list[str], folder: Path) -> str | None:
    """Train with a vLLM server, and let a second one replace it; return what is wrong."""
    run = folder / "runs" / "quickstart" / "served"
    with vllm_server(folder) as first, vllm_server(folder) as second:
        engine = [
            "actor_rollout_ref.rollout.name=vllm_server",
            f"+actor_rollout_ref.rollout.engine_kwargs.url={first}",
        ]
        command = ["train", "grpo", *settings, *POOL, *LONG, *engine, "--name", "served"]
        process = start(*command, cwd=folder)
        wait_for_steps(process, run, 3)
        rlctl("engines", "add", "served", "--url", second, cwd=folder)
        rlctl("engines", "drain", "served", 0, cwd=folder)
        process.communicate()
    rows = metrics(run)[1:]
    largest = max(row["training/rollout_probs_diff_max"] for row in rows)
    if process.returncode or largest > 1e-4:
        return f"exit code {process.returncode}, |π_engine - π_trainer| up to {largest:.1e}"
    return None


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """Yield the address of a vLLM server on the CPU with the model in `folder`."""
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
            [sys.executable, *words, "--host", "127.0.0.1", *SERVER],
            cwd=folder,
            env=environment() | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ready() -> bool:
        assert process.poll() is None, Path(log.name).read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
            return False

    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(ready, process.pid, "the vLLM server")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

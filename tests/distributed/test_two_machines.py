"""Runs on two machines: network namespaces with host names and no folder in common.

Each machine has its own address on a bridge, its own shared memory and its own working folder;
only the installed packages are the same.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.runtime.cluster.session import RAY_SETTINGS
from tests.e2e.command import TIMEOUT_S, environment, metrics, reproducible, wait_for_steps
from tests.e2e.conftest import small, write_shelf
from tests.e2e.killed_runs import events
from tests.progress import wait_until
from tests.settings import given

pytestmark = [pytest.mark.soak, pytest.mark.slow]

NETWORK = "10.77.0"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
BIN = Path(sys.executable).parent
ENGINES_AWAY = [
    "trainer.placement.pools={main: 1, engines: 1}",
    "trainer.placement.rollout=engines",
]


@dataclass
class Machine:
    """A machine at `address`, whose processes are children of `anchor` or use its namespaces."""

    number: int
    namespace: str  # of its network
    folder: Path  # a file system of its own
    anchor: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command in the machine's folder."""
        own = {
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        enter = ["nsenter", "-t", str(self.anchor.pid), "-n", "-u", "-m"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]
        return subprocess.Popen(
            [*enter, *there, *map(str, words)],
            env=environment() | own | TOKEN | RAY_SETTINGS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: object, code: int = 0) -> str:
        """Run a command to its end, check its exit code and return its output."""
        process = self.start(*words)
        text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, f"{words}: exit {process.returncode}\n{text}"
        return text

    def kill(self) -> None:
        """Kill all processes of the machine but its anchor."""
        found = _ip("netns", "pids", self.namespace).split()
        for pid in {int(each) for each in found} - {self.anchor.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def read(self, path: str) -> str:
        """Return the text of a file below the machine's folder; empty if there is none."""
        return self.run("sh", "-c", f"cat {path} 2>/dev/null || true")


def _ip(*words: str, check: bool = True) -> str:
    command = ["ip", *words]
    done = subprocess.run(command, check=check, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    """Start two machines with a Ray node each, the first one the head."""
    bridge, names = f"rlctl{os.getpid()}", {n: f"rl{os.getpid()}-{n}" for n in (1, 2)}
    if shutil.which("ip") is None or shutil.which("nsenter") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, ip and nsenter")
    folder = Path(tempfile.mkdtemp(prefix="rlm", dir="/tmp"))  # short: paths of sockets are limited
    found: list[Machine] = []
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        _ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in names.items():
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            script = (
                f"hostname machine{number} && mount -t tmpfs tmpfs {folder} && "
                f"mount -t tmpfs tmpfs /dev/shm && mkdir {folder}/tmp && echo ready && "
                "exec sleep infinity"
            )
            command = ["ip", "netns", "exec", name, "unshare", "-um", "sh", "-c", script]
            anchor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert anchor.stdout.readline() == "ready\n"
            found.append(Machine(number, name, folder, anchor))
        write_files(found)
        head, other = found
        start = ("ray", "start", "--num-cpus=2", "--disable-usage-stats")
        head.run(
            *(*start, "--head", "--port=6379", f"--node-ip-address={head.address}"),
            *("--dashboard-host=0.0.0.0", "--include-dashboard=true"),
        )
        other.run(*start, f"--address={head.address}:6379", f"--node-ip-address={other.address}")
        yield found
    finally:
        for machine in found:
            machine.kill()
            machine.anchor.kill()
            machine.anchor.wait(timeout=60)
        for name in names.values():
            _ip("link", "del", name, check=False)
            _ip("netns", "del", name, check=False)
        _ip("link", "del", bridge, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def write_files(machines: list[Machine]) -> None:
    """Copy a model to both machines and rows to the first, which has the driver."""
    with tempfile.TemporaryDirectory() as made:
        folder = write_shelf(Path(made))
        for machine in machines:
            root = f"/proc/{machine.anchor.pid}/root{machine.folder}"
            shutil.copytree(folder / "model", f"{root}/model")
        for name in ("train.parquet", "val.parquet"):
            shutil.copy(folder / name, f"/proc/{machines[0].anchor.pid}/root{machines[0].folder}")


def settings(machine: Machine, steps: int, root: Path | None = None) -> list[str]:
    return [
        *small(machine.folder),
        *given(batch=4, n=2, steps=steps, validate_first=False, save=1),
        *given(project="two", runs=f"{root or machine.folder}/runs"),
        f"ray_kwargs.ray_init.address={machine.address}:6379",
    ]


def steps_of(machine: Machine, name: str) -> list[int]:
    rows = machine.read(f"runs/two/{name}/metrics.jsonl").splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["step"] > 0]


def events_of(machine: Machine, name: str, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, machine.read(f"runs/two/{name}/events.jsonl").splitlines())
    return [event for event in events if event["kind"] == kind]


def placed(machine: Machine, name: str) -> set[str]:
    """Return the host names of a run's processes."""
    return {
        node
        for event in events_of(machine, name, "placed")
        for nodes in event.values()
        if isinstance(nodes, list)
        for node in nodes
    }


def test_engines_on_the_other_machine_and_a_resumed_run(machines: list[Machine]) -> None:
    head, _ = machines
    head.run("rlctl", "train", "grpo", "--name", "a", *settings(head, 2), *ENGINES_AWAY)
    assert steps_of(head, "a") == [1, 2]
    assert len(placed(head, "a")) == 2
    head.run("rlctl", "resume", "a", "trainer.total_training_steps=3")
    assert steps_of(head, "a") == [1, 2, 3]


def test_only_changed_weights_travel_without_a_change_of_results(
    machines: list[Machine], tmp_path: Path
) -> None:
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    words = ["actor_rollout_ref.model.dtype=bfloat16", f"{engine}.backend=gloo"]
    rows = []
    for name, value in (("all", "false"), ("changes", "true")):
        given = [*settings(machines[0], 4, tmp_path), *ENGINES_AWAY, *words]
        machines[0].run(
            *("rlctl", "train", "grpo", "--name", name, *given, f"{engine}.only_changes={value}")
        )
        rows.append(reproducible(tmp_path / "runs" / "two" / name))
    assert rows[0] == rows[1]


def test_ranks_without_a_common_folder_are_refused(machines: list[Machine]) -> None:
    head, _ = machines
    wide = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    text = head.run("rlctl", "train", "grpo", "--name", "wide", *settings(head, 1), *wide, code=3)
    assert "trainer.run_dir" in text


@pytest.mark.extra("vllm")
@pytest.mark.parametrize("backend", ["object_store", "gloo"])
def test_an_engine_is_divided_over_the_machines(
    machines: list[Machine], backend: str, tmp_path: Path
) -> None:
    """Both machines see the folder of the run. The loss of a process does not end it."""
    head, _ = machines
    rollout = "actor_rollout_ref.rollout"
    wide = [
        *("trainer.nnodes=2", *ENGINES_AWAY, f"{rollout}.name=vllm"),
        f"{rollout}.tensor_model_parallel_size=2",
        f"{rollout}.checkpoint_engine.backend={backend}",
    ]
    process = head.start(
        "rlctl", "train", "grpo", "--name", "a", *settings(head, 6, tmp_path), *wide
    )
    run = tmp_path / "runs" / "two" / "a"
    wait_for_steps(process, run, 2)
    log = run / "attempts" / "1" / "engines-0-rank-1.log"
    second = next(each for each in psutil.process_iter() if has_open(each, log))
    second.kill()
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text
    [placed] = events(run, "placed")
    [engine] = placed["engines"]
    assert len(engine.split(", ")) == 2
    assert [event["node"] for event in events(run, "engine_restarted")] == [engine]
    rows = metrics(run)
    assert len(rows) == 6
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4


@pytest.mark.extra("vllm")
def test_an_engine_of_the_actor_is_divided_over_the_machines(
    machines: list[Machine], tmp_path: Path
) -> None:
    wide = given(nodes=2, ranks=1, engine="vllm", tensor=2)
    words = [*settings(machines[0], 2, tmp_path), *wide]
    machines[0].run("rlctl", "train", "grpo", "--name", "a", *words)
    rows = metrics(tmp_path / "runs" / "two" / "a")
    assert len(rows) == 2
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4


def has_open(process: psutil.Process, file: Path) -> bool:
    with suppress(psutil.Error):
        return str(file) in [each.path for each in process.open_files()]
    return False


def test_a_run_that_loses_a_machine_goes_on_and_is_stopped(machines: list[Machine]) -> None:
    head, other = machines
    long = [*settings(head, 1000), *ENGINES_AWAY]
    process = head.start("rlctl", "train", "grpo", "--name", "long", *long)
    threading.Thread(target=process.communicate, daemon=True).start()
    wait_until(lambda: len(steps_of(head, "long")) > 1, process.pid, "two steps")
    other.kill()
    lost = len(steps_of(head, "long"))
    wait_until(lambda: len(steps_of(head, "long")) > lost + 2, process.pid, "more steps")
    restarted = events_of(head, "long", "engine_restarted")
    assert [event["node"].split()[0] for event in restarted] == [head.address]
    head.run("rlctl", "stop", "long")
    assert process.wait(timeout=600) == 143
    assert json.loads(head.read("runs/two/long/run.json"))["state"] == "stopped"

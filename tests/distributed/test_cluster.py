"""Training runs, sweeps and jobs on real Ray clusters of one and two nodes on this machine.

Jobs are in the soak: a dashboard starts ten processes. tests/runtime/test_job_files.py has the
command with a stand-in for the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from rlctl.recipes.compose import compose
from rlctl.runs.events import read_events
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.cluster.engine_group import EnginePool
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.cluster.session import RAY_SETTINGS
from rlctl.runtime.cluster.system import Sampler, sample_machine
from rlctl.runtime.cluster.system_probes import other_machines
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import WHOLE, WeightChannel, to_buckets, whole
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.workers import ResourcePool, Worker, dispatch, session, spawn
from tests.distributed.ranks import rank_info
from tests.e2e.command import environment, metrics, rlctl, train
from tests.e2e.conftest import small, write_shelf
from tests.forks import ONE_MACHINE, read_ray_variables
from tests.generation import full_forward
from tests.models import tiny_model, write_tiny_model
from tests.ports import free_port
from tests.progress import wait_until
from tests.settings import given
from tests.tolerance import assert_as_exact, in_float64

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
NODE_SETTINGS = TOKEN | RAY_SETTINGS
WITH_TOKEN: dict[str, Any] = {"more": TOKEN | {ONE_MACHINE: "1"}}


NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster of two nodes with one CPU each.

    Other machines could reach it, so it requires the token of `TOKEN`.
    """
    shell = pytest.MonkeyPatch()
    for name, value in NODE_SETTINGS.items():
        shell.setenv(name, value)
    read_ray_variables()
    cluster = Cluster(
        initialize_head=True, connect=False, head_node_args=NODE | {"include_dashboard": False}
    )
    cluster.add_node(**NODE)
    cluster.wait_for_nodes(timeout=600)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shell.undo()
    read_ray_variables()


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> str:
    return cluster.address


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, address: str) -> list[str]:
    return [
        *small(write_shelf(tmp_path_factory.mktemp("folder"))),
        *given(batch=4, steps=1, validate=1, validate_first=False, project="two"),
        f"ray_kwargs.ray_init.address={address}",
    ]


def nodes(run: Path) -> set[str]:
    """Return the nodes of a run's processes according to its event log."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {node for event in events if event["kind"] == "placed" for node in event["main"]}


@pytest.mark.plugin("bridges")
@pytest.mark.soak
def test_run_uses_both_nodes(settings: list[str], tmp_path: Path) -> None:
    sampled = ("trainer.logger=[console,tensorboard]", "trainer.tracking.system_s=0.1")
    wide = (*settings, *given(nodes=2, ranks=1), *sampled)
    run = train("sft", "wide", *wide, cwd=tmp_path, **WITH_TOKEN)
    assert len(nodes(run)) == 2
    [sampled_nodes] = [each for each in read_events(run) if each["kind"] == "system_nodes"]
    assert len(sampled_nodes["nodes"]) == 2
    assert metrics(run)[-1]["actor/grad_norm"] > 0


class Where(Worker):
    """A worker that knows its node."""

    @dispatch(collect_fn=lambda _group, nodes: nodes)
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@pytest.mark.soak
def test_the_use_of_the_other_node_is_sampled(address: str) -> None:
    with session(address):
        addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
        with other_machines(addresses) as machines:
            [machine] = machines.values()
            with Sampler(0.01, [sample_machine, machine]) as sampler:
                wait_until(lambda: "system/node1/cpu_percent" in sampler.read(), os.getpid(), "use")


@pytest.mark.slow
@pytest.mark.soak
def test_a_program_places_processes_on_each_node(address: str) -> None:
    with session(address), ResourcePool([1, 1]) as pool:
        ids = spawn(Where, pool).node()
        assert len(set(ids)) == 2
        assert [node[:8] for node in ids] == [node.split()[1] for node in pool.nodes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lost"),
    [
        pytest.param("object_store", "process", marks=pytest.mark.soak),
        ("gloo", "process"),
        pytest.param("gloo", "node", marks=pytest.mark.soak),
    ],
)
def test_an_engine_is_divided_over_both_nodes(
    cluster: Cluster, tmp_path: Path, backend: str, lost: str
) -> None:
    """It gets weights and generates; when a part of it is lost, all of it is started again."""
    model = write_tiny_model(tmp_path / "model")
    way = f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"
    config = compose("grpo", [f"actor_rollout_ref.model.path={model}", way]).config
    policy, events = config.actor_rollout_ref, list[str]()
    rollout = RolloutSpec(policy.model, SamplingConfig(policy.rollout, 12, (2,)), 40, seed=1)
    where = replace(rank_info(), log_path=tmp_path / "engines.log")
    spec = PoolSpec("engines", 2, where, 600.0, 600.0, False, 1.0)
    rows = Ragged.from_rows([torch.arange(5, 5 + length) for length in (3, 9, 6)])
    prompts = Prompts(rows, torch.arange(3), [])
    with session(cluster.address):
        pool = EnginePool(spec, 300.0, lambda kind, **_: events.append(kind), (1, 1))
        engines = pool.spawn(rollout)
        engines.wait()
        [places] = pool.nodes
        assert len(places.split(", ")) == 2
        engines.update_weights(_send_weights)
        generator = SeparateEngines(cast(Any, SimpleNamespace()), engines)
        rollouts = generator.generate_sequences(prompts, seed=3)
        if lost == "process":
            ray.kill(pool.engines.engines[0].followers[0])
        else:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            cluster.add_node(**NODE)
        again = generator.generate_sequences(prompts, seed=3)
        assert (pool.nodes == [places]) == (lost == "process")
        pool.close()
    assert events[0] == "engine_lost"
    assert events[-1] == "engine_restarted"
    assert len(events) == 2 or lost == "node", "Ray may place a process on a node that is lost"
    assert torch.equal(rollouts.rollout_log_probs.values, again.rollout_log_probs.values)
    policy, row = tiny_model(seed=5, vocab_size=259), rollouts.response_ids.rows()[0]
    second, exact = (
        full_forward(model, rows.rows()[0], row, 1.0) for model in (policy, in_float64(policy))
    )
    assert_as_exact(rollouts.rollout_log_probs.rows()[0], second, exact)


def _send_weights(channel: WeightChannel[Any]) -> list[Any]:
    weights = whole(tiny_model(seed=5, vocab_size=259).named_parameters())
    for bucket in to_buckets(weights, WHOLE, torch.float32, 2**16):
        channel.send(bucket)
    return [channel.close(1)]


@pytest.mark.soak
@pytest.mark.slow
def test_trials_run_on_both_nodes(settings: list[str], tmp_path: Path) -> None:
    axis = "actor_rollout_ref.actor.optim.lr=1e-4,1e-3"
    options = ("--metric", "actor/lr", "--name", "spread")
    done = rlctl("sweep", "grpo", *settings, axis, *options, cwd=tmp_path, **WITH_TOKEN)
    assert "2 at once" in done.stderr
    first, second = (nodes(tmp_path / "runs" / "two" / f"spread-00{number}") for number in range(2))
    assert len(first | second) == 2


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a one-node cluster with `ray start` and yield the address of its dashboard.

    It listens on all interfaces, so it requires the token of `TOKEN`.
    """
    binaries = Path(sys.executable).parent
    environ = environment() | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        **NODE_SETTINGS,
    }
    ports = [free_port() for _ in range(4)]
    # A short path: socket paths inside are limited to 107 characters.
    folder = Path("/tmp") / f"rlctl-test-{os.getpid()}"
    command = [
        *(binaries / "ray", "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}"),
        *("--disable-usage-stats", "--include-dashboard=true", f"--port={ports[0]}"),
        *(f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}"),
        # The default port is used by another cluster of this machine.
        f"--dashboard-agent-listen-port={ports[3]}",
    ]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=environ, stdout=silent, stderr=silent, start_new_session=True
    )
    url = f"http://127.0.0.1:{ports[1]}"

    def replies() -> bool:
        assert process.poll() is None, "the cluster has exited"
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=5).read()
        except urllib.error.HTTPError as error:
            if error.code == 401:  # it requires the token
                return True
            raise
        except OSError:
            return False
        raise AssertionError("the dashboard replies without a token")

    wait_until(replies, process.pid, "the dashboard")
    yield url
    for started in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):  # it has exited with another one
            started.kill()
    process.wait(timeout=600)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.soak
def test_job_runs_with_project_files(dashboard: str, settings: list[str], tmp_path: Path) -> None:
    """The job receives the project's recipe and reward function; its log returns."""
    write_recipe(tmp_path)
    root = f"trainer.run_dir={tmp_path}/runs"
    done = submit(dashboard, settings, root, "--name", "job", cwd=tmp_path)
    assert "step 1/1" in done.stderr
    assert " INFO " not in done.stderr.replace("\t", " "), "nothing of Ray's log"
    run = tmp_path / "runs" / "two" / "job"
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    command = str(json.loads((run / "run.json").read_text())["command"])
    assert command.count("experiment_name") == command.count("run_dir") == 1
    assert metrics(run)[-1]["critic/score/max"] > 0
    followed = rlctl("logs", "job", "-f", "--address", dashboard, cwd=tmp_path, **WITH_TOKEN)
    assert "step 1/1" in followed.stderr


@pytest.mark.slow
@pytest.mark.soak
def test_failed_job_returns_its_error(dashboard: str, settings: list[str], tmp_path: Path) -> None:
    """The job receives the project's recipe, which names the missing file."""
    write_recipe(tmp_path, "data: {val_files: /nowhere/val.parquet}\n")
    own = [text for text in settings if "val_files" not in text]
    done = submit(dashboard, own, "--name", "bad", cwd=tmp_path, code=3)
    assert "/nowhere/val.parquet" in done.stderr
    assert " INFO " not in done.stderr.replace("\t", " "), "nothing of Ray's log"


def write_recipe(folder: Path, more: str = "") -> None:
    """Write a recipe with a reward function, which is also in the folder."""
    (folder / "mine.yaml").write_text(
        "defaults: [grpo_trainer, _self_]\n"
        "reward: {custom_reward_function: {path: reward.py, name: score}}\n" + more
    )
    (folder / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) / 8\n"
    )


def submit(dashboard: str, settings: list[str], *words: str, cwd: Path, code: int = 0) -> Any:
    """Run the recipe as a job of the cluster; return the command that waited for it."""
    own = [text for text in settings if "address" not in text]
    train = ["train", "grpo", "--recipe", "mine.yaml", *own, *words, "--address", dashboard]
    return rlctl(*train, cwd=cwd, code=code, **WITH_TOKEN)

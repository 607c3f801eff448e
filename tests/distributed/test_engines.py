"""Rollout engines in Ray processes with a trainer in this one: weight sync and lost engines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runs.engine_requests import EngineRequest, PoolStatus, RequestStatus, send
from rlctl.runtime.base.batch import Experience, LogProbs, Prompts, Ragged, Rollouts
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster import membership
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_group import WeightGroup
from rlctl.runtime.rollout.weight_sync import Bucket, Part, to_buckets
from rlctl.runtime.workers import weight_sending
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.rollout import RolloutSpec
from tests.distributed.ranks import rank_info
from tests.generation import exact_log_probs
from tests.models import write_tiny_model
from tests.tolerance import assert_as_exact
from tests.warm_workers import warm_workers
from tests.workers import learnable

# An engine that fails on request, by files in its folder: it crashes ("die") or hangs ("hang")
# during generation, corrupts received weights ("spoil"), crashes ("fall") or hangs ("freeze")
# during a weight sync in a group, or does not start ("full").
ENGINE = '''
import os, pathlib, signal, time
from rlctl.runtime.rollout.weight_group import WeightGroup
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.weight_sync import Bucket

FOLDER = pathlib.Path(__file__).parent

def requested(what):
    """Return True once for each file of that name and a number."""
    for path in sorted(FOLDER.glob(what + "-*")):
        try:
            path.unlink()
            return True
        except FileNotFoundError:
            pass
    return False

class Engine(HFEngine):
    @classmethod
    def from_spec(cls, spec, policy):
        if (FOLDER / "full").exists():
            print("the engine does not start", flush=True)
            os._exit(9)
        print("the engine is built", flush=True)
        return super().from_spec(spec, policy)

    def step(self):
        (FOLDER / f"pid-{os.getpid()}").touch()
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes % 4 == 0 and requested("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.passes % 4 == 0 and requested("hang"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step()

verify = Bucket.verify

def verify_spoiled(bucket):
    if requested("spoil"):
        data = bucket.data.clone()
        data[7] ^= 4
        bucket = Bucket(bucket.header, data)
    verify(bucket)

Bucket.verify = verify_spoiled

receive = WeightGroup.receive

def receive_and_fail(self):
    for message in receive(self):
        for what, sent in (("fall", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
            if isinstance(message, Bucket) and message.header.number == 0 and requested(what):
                os.kill(os.getpid(), sent)
        yield message

WeightGroup.receive = receive_and_fail
'''


MODEL = "actor_rollout_ref.model.path="
OVERRIDES = ["actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.use_kl_loss=false"]


class Stage:
    """Trainer in this process and engines on Ray that fail on request."""

    def __init__(self, folder: Path, config: schema.Config, num_engines: int = 2) -> None:
        from rlctl.runtime.cluster.engine_group import EnginePool

        self.folder, self.config = folder, config
        self.events: list[tuple[str, dict[str, Any]]] = []
        log = replace(rank_info(), log_path=folder / "engines.log")
        spec = PoolSpec("engines", num_engines, log, 90.0, 60.0, False, 1.0)
        restart_timeout_s = 300.0  # for a busy machine, too
        self.pool = EnginePool(
            spec, restart_timeout_s, lambda kind, **fields: self.events.append((kind, fields))
        )
        sampling = SamplingConfig(config.actor_rollout_ref.rollout, 12, (2,))
        model = config.actor_rollout_ref.model
        self.engines = self.pool.spawn(RolloutSpec(model, sampling, 40, seed=1))
        algorithm = load_algorithm(config, 20)
        trained = ActorSpec(model, config.actor_rollout_ref.actor, sampling, 40, algorithm, 1)
        self.trainer = ActorWorker(rank_info(), trained)
        self.engines.wait()
        self.generator = SeparateEngines(self.trainer, self.engines)

    def generate(self, seed: int) -> Rollouts:
        """Sync the weights and generate responses to the usual prompts."""
        self.generator.update_weights()
        return self.generator.generate_sequences(prompts(), seed=seed)

    def request(self, what: str, times: int = 1) -> None:
        """Make an engine fail in the manner `what`; see `ENGINE`."""
        for number in range(times):
            (self.folder / f"{what}-{number}").touch()

    def wait_for_restart(self) -> Rollouts:
        """Generate until a lost engine has restarted, and return the last rollouts."""
        deadline = time.monotonic() + 300
        while True:
            rollouts = self.generate(seed=3)
            if "engine_restarted" in self.kinds():
                return rollouts
            assert time.monotonic() < deadline

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("engines")
    write_tiny_model(folder / "model")
    (folder / "failing_engine.py").write_text(ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # the trainer asks the engine's class what it receives
        patch.setattr(
            weight_sending,
            "to_buckets",
            lambda rows, part, dtype, _, *more: to_buckets(rows, part, dtype, 50_000, *more),
        )
        yield folder


@pytest.fixture(scope="module")
def config(folder: Path) -> schema.Config:
    named = [f"{MODEL}{folder}/model", "actor_rollout_ref.rollout.name=failing_engine:Engine"]
    return compose("grpo", [*OVERRIDES, *named]).config


@pytest.fixture(scope="module")
def ray(folder: Path, config: schema.Config) -> Iterator[None]:
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    with warm_workers(), ray_session(config.ray_kwargs.ray_init, 4, 1, 120.0):
        yield


@pytest.fixture(scope="module")
def shared_stage(ray: None, folder: Path, config: schema.Config) -> Iterator[Stage]:
    stage = Stage(folder, config)
    yield stage
    stage.pool.close()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.events.clear()
    return shared_stage


def prompts(num: int = 18) -> Prompts:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (num,), generator=generator)
    ids = torch.randint(3, 259, (int(lengths.sum()),), generator=generator)
    return Prompts(Ragged(ids, lengths), torch.arange(num), [])


def experience(rollouts: Rollouts, old: Ragged) -> Experience:
    """Return an experience with random scores, to change the weights."""
    scores = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(2))
    return learnable(rollouts, old, scores)


def assert_same(stage: Stage, first: Rollouts, second: Rollouts) -> None:
    """Compare responses; log-probs have other roundings in another batch of an engine."""
    assert torch.equal(first.response_ids.values, second.response_ids.values)
    exact = exact_log_probs(stage.trainer.policy.hf, first)
    assert_as_exact(first.rollout_log_probs.values, second.rollout_log_probs.values, exact)


def assert_current(stage: Stage, rollouts: Rollouts, old: LogProbs | None = None) -> None:
    """Check that engines had the trainer's weights, whose own log-probs may be `old`."""
    old = old or stage.trainer.compute_log_probs(rollouts)
    exact = exact_log_probs(stage.trainer.policy.hf, rollouts)
    assert_as_exact(rollouts.rollout_log_probs.values, old.log_probs.values, exact)


def test_engines_generate_with_current_weights(stage: Stage) -> None:
    """Log-probs equal the trainer's after each of four updates, tokens a colocated engine's."""
    addresses = set[object]()
    for step in range(5):
        rollouts = stage.generate(seed=step)
        addresses.add(stage.engines.group._address)
        old = stage.trainer.compute_log_probs(rollouts)
        assert_current(stage, rollouts, old)
        if step < 4:
            stage.trainer.update(experience(rollouts, old.log_probs), lr=1e-2)
    plain = compose("grpo", [*OVERRIDES, f"{MODEL}{stage.folder}/model"]).config
    sampling = replace(stage.trainer.spec.sampling, rollout=plain.actor_rollout_ref.rollout)
    colocated = ActorWorker(rank_info(), replace(stage.trainer.spec, sampling=sampling))
    colocated.start_engine()
    colocated.update_weights()
    before = colocated.generate_sequences(prompts(), seed=4)
    colocated.policy.load_state_dict(stage.trainer.policy.state_dict())
    colocated.engine_is_stale = True
    colocated.update_weights()
    after = colocated.generate_sequences(prompts(), seed=4)
    assert torch.equal(rollouts.response_ids.values, after.response_ids.values)
    assert not torch.equal(after.response_ids.values[:100], before.response_ids.values[:100])
    assert rollouts.group.tolist() == [number for number in range(18) for _ in range(3)]
    # Validation is greedy, with one response per prompt.
    validation = stage.generator.generate_sequences(prompts(5), seed=1, validate=True)
    assert torch.equal(
        validation.response_ids.values,
        colocated.generate_sequences(prompts(5), seed=7, validate=True).response_ids.values,
    )
    assert stage.events == []
    assert len(addresses) == 1, "the group is formed once"


def test_config_error_is_raised_without_restart(stage: Stage) -> None:
    """A prompt that is too long for the model does not restart the engine."""
    stage.generator.update_weights()
    long = Prompts(Ragged(torch.full((300,), 5), torch.tensor([300])), torch.arange(1), [])
    with pytest.raises(RlctlError, match="prompt 0 of the batch has 300 tokens"):
        stage.generator.generate_sequences(long, seed=1)
    assert stage.events == []


@pytest.mark.parametrize("what", ["die", pytest.param("hang", marks=pytest.mark.soak)])
def test_engine_lost_during_generation_does_not_change_responses(
    stage: Stage, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = stage.generate(seed=3)
    if what == "hang":
        monkeypatch.setattr(
            stage.pool.engines, "spec", replace(stage.pool.engines.spec, call_timeout_s=15.0)
        )
    stage.request(what)
    assert_same(stage, stage.generate(seed=3), undisturbed)
    assert stage.kinds()[0] == "engine_lost"
    assert stage.events[0][1]["requests"] >= 1
    assert "is lost" in caplog.text
    assert_same(stage, stage.wait_for_restart(), undisturbed)
    stage.trainer.update(experience(undisturbed, undisturbed.rollout_log_probs), lr=1e-2)
    rollouts = stage.generate(seed=4)
    assert {engine.version for engine in stage.pool.engines.engines} == {stage.engines.version}
    assert_current(stage, rollouts)
    assert stage.kinds() == ["engine_lost", "engine_restarted"]


def ask(stage: Stage, request: EngineRequest) -> RequestStatus:
    """Send a request through the folder of the run, and generate until it is done or failed."""
    send(stage.folder, request)
    deadline = time.monotonic() + 300
    while True:
        status = PoolStatus.read(stage.folder)
        found = status and status.request(request.id)
        if found is not None and found.progress != "waiting":
            return found
        stage.generate(seed=3)
        assert time.monotonic() < deadline


def test_engines_join_and_leave_without_a_change_of_responses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_POLL_S", 0.1)
    undisturbed = stage.generate(seed=3)
    assert ask(stage, EngineRequest("add", count=1)).message == "added engine 2"
    assert_same(stage, stage.generate(seed=3), undisturbed)
    assert ask(stage, EngineRequest("drain", engines=[0])).message == "drained engine 0"
    assert_same(stage, stage.generate(seed=3), undisturbed)
    assert [each.number for each in stage.pool.engines.engines] == [1, 2]
    assert stage.kinds() == ["engine_request", "engine_added", "engine_request", "engine_drained"]
    refused = ask(stage, EngineRequest("drain", count=2))
    assert (refused.progress, "the last engine" in refused.message) == ("failed", True)
    large = replace(stage.pool.engines.spec, device_fraction=9.0, start_timeout_s=0.5)
    monkeypatch.setattr(stage.pool.engines, "spec", large)
    refused = ask(stage, EngineRequest("add", count=1))
    assert refused.message.startswith("0 of 1 engines started: 1 × {'CPU': 9.0} were not free")
    monkeypatch.undo()
    status = PoolStatus.read(stage.folder)
    states = [(each.engine, each.state) for each in status.engines]
    assert states == [(1, "serving"), (2, "serving")]
    assert all(each.responses and each.tokens_per_s for each in status.engines)


@pytest.mark.parametrize(
    "what",
    [
        "fall before it is sent to",
        *(pytest.param(what, marks=pytest.mark.soak) for what in ("fall", "freeze")),
    ],
)
def test_engine_lost_during_weight_sync_gets_a_new_group(
    stage: Stage, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine receives all weights and generates; the lost one syncs after its restart."""
    stage.engines.mark_stale()
    if what == "freeze":
        monkeypatch.setattr(
            stage.pool.engines, "spec", replace(stage.pool.engines.spec, call_timeout_s=10.0)
        )
    request = stage.folder / f"{what.split()[0]}-0"
    request.touch()
    if what == "fall before it is sent to":
        send = WeightGroup.send

        def send_late(group: WeightGroup, message: Bucket | int, part: Part) -> None:
            """Send the second bucket once the engine has fallen and its connection is closed."""
            if isinstance(message, Bucket) and message.header.number == 1:
                deadline = time.monotonic() + 60
                while request.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)
            send(group, message, part)

        monkeypatch.setattr(WeightGroup, "send", send_late)
    rollouts = stage.generate(seed=3)
    assert stage.kinds()[0] == "engine_lost"
    assert_current(stage, rollouts)
    assert_same(stage, stage.wait_for_restart(), rollouts)
    assert {engine.version for engine in stage.pool.engines.engines} == {stage.engines.version}


def through(stage: Stage, backend: str, patch: pytest.MonkeyPatch) -> None:
    """Let weights reach the engines through this backend."""
    rollout = stage.engines.rollout
    way = {"checkpoint_engine": rollout.checkpoint_engine.model_copy(update={"backend": backend})}
    patch.setattr(stage.engines, "rollout", rollout.model_copy(update=way))


@pytest.mark.parametrize("backend", ["object_store", "auto"])
def test_corrupted_weights_stop_the_run(
    stage: Stage, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    through(stage, backend, monkeypatch)
    stage.generate(seed=1)
    stage.engines.mark_stale()
    stage.request("spoil")
    with pytest.raises(
        RlctlError,
        match=r"corrupted in transit: bucket 0 was sent with checksum [0-9a-f]{8} "
        r"and arrived with [0-9a-f]{8}",
    ):
        stage.generate(seed=1)


def test_run_fails_with_a_reason_when_all_engines_are_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.pool.engines, "restart_timeout_s", 4.0)
    stage.generate(seed=1)
    (stage.folder / "full").touch()
    for process in engine_processes(stage.folder):
        process.kill()
    begin = time.monotonic()
    with pytest.raises(
        RlctlError, match="no rollout engine is left, and none could be started again within 4 s"
    ) as caught:
        stage.generate(seed=1)
    assert time.monotonic() - begin >= 4
    logs = [log for engine in stage.pool.engines.engines for log in engine.logs]
    assert len(logs) == 2
    for log in logs:  # each with its last lines
        assert f"{log}\n    " in str(caught.value)


def engine_processes(folder: Path) -> list[psutil.Process]:
    """Return the engines that live; the number of a lost one may be that of another process."""
    found = []
    for path in folder.glob("pid-*"):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.name.removeprefix("pid-")))
            if process.create_time() <= path.stat().st_mtime:
                found.append(process)
    return found

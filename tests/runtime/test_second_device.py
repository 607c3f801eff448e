"""Roles on a device whose tensors do not mix with those of the CPU: see tests/second_device.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlctl.quickstart import VISION, real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience, LogProbs, Prompts
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.load import load_model
from rlctl.runtime.rollout.hf import HFEngine, Steps
from rlctl.runtime.workers.actor import ActorWorker
from tests import workers
from tests.distributed.ranks import rank_info
from tests.generation import sampling
from tests.models import tiny_model, write_tiny_model
from tests.second_device import NAME, DeviceError, SecondDevice
from tests.workers import actor_of, critic_of

ROWS = 4
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # `Module.to` would untie weights, because tensors of the second device are of another class.
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


# The fused kernel is for real devices; eps: no sign of rounding errors.
ADAMW = "optim.override_optimizer_config={fused: false, eps: 1.0}"


def experience() -> Experience:
    return workers.experience((3, 7), (0, 0, 1, 1), (1, 12, 5, 20), shift=-4.0, masked=())


def actor(where: RankInfo, model: Path, *overrides: str) -> ActorWorker:
    config = compose(
        "grpo",
        [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.name=hf",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.ppo_max_token_len_per_gpu=40",
            f"{ACTOR}.{ADAMW}",
            *overrides,
        ],
    ).config
    return actor_of(where, config, stops=(2, 7))


def on_both(
    work: Callable[[RankInfo], dict[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], SecondDevice]:
    """Check that `work` gives the same on the CPU and on the second device, and return it."""
    expected = work(rank_info())
    with SecondDevice() as device:
        found = work(dataclasses.replace(rank_info(), device=NAME))
        found = {name: value.cpu() for name, value in found.items()}
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    return expected, device


def weights_of(worker: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in worker.policy.named_parameters()}


def log_probs(result: LogProbs) -> dict[str, torch.Tensor]:
    fields = {name: value for name, value in vars(result).items() if value is not None}
    return {name: value.values for name, value in fields.items()}


@pytest.mark.parametrize(
    ("mode", "share"),
    [("token-mean", True), pytest.param("seq-mean-token-mean", False, marks=pytest.mark.soak)],
)
def test_actor_learns(model: Path, mode: str, share: bool) -> None:
    batch = experience() if share else experience().select(torch.tensor([0, 3]))

    def work(where: RankInfo) -> dict[str, torch.Tensor]:
        worker = actor(where, model, f"{ACTOR}.loss_agg_mode={mode}")
        before = log_probs(worker.compute_log_probs(batch))
        top = log_probs(worker.compute_log_probs(batch, "base", top_k=3))
        metrics = to_floats(worker.update(batch, lr=1e-2))
        numbers = {name: torch.tensor(value) for name, value in metrics.items()}
        base = {f"base {name}": each for name, each in top.items()}
        return before | base | weights_of(worker) | numbers

    _, device = on_both(work)
    assert not [each for each in device.syncs if each.startswith(("nonzero", "index"))]


@pytest.mark.plugin("objectives")
def test_a_policy_loss_that_draws_tokens(model: Path) -> None:
    batch = experience()

    def work(where: RankInfo) -> dict[str, torch.Tensor]:
        worker = actor(where, model, f"{ACTOR}.policy_loss.loss_mode=clip_cov")
        worker.update(batch, lr=1e-2)
        return weights_of(worker)

    on_both(work)


def test_critic_learns(model: Path) -> None:
    batch = experience()
    overrides = [f"critic.model.path={model}", f"actor_rollout_ref.model.path={model}"]
    config = compose(
        "ppo", [*overrides, "critic.ppo_max_token_len_per_gpu=40", f"critic.{ADAMW}"]
    ).config

    def work(where: RankInfo) -> dict[str, torch.Tensor]:
        worker = critic_of(where, config)
        metrics = to_floats(worker.update(batch, lr=1e-2))
        values = worker.compute_values(batch).values
        return {"values": values} | {k: torch.tensor(v) for k, v in metrics.items()}

    on_both(work)


def test_engine_samples_and_waits_once_per_token(model: Path) -> None:
    prompts = experience().prompt_ids.select(torch.arange(0, ROWS, 2))
    batch = Prompts(prompt_ids=prompts, group=torch.arange(2), rows=[])
    settings = ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.n=3")

    def work(where: RankInfo) -> dict[str, torch.Tensor]:
        worker = actor(where, model, *settings)
        worker.start_engine()
        worker.update_weights()
        rollouts = worker.generate_sequences(batch, seed=1)
        return {"ids": rollouts.response_ids.values, "lengths": rollouts.response_ids.lengths}

    expected, device = on_both(work)
    waits = {each: n for each, n in device.syncs.items() if "running.py" in each}
    assert max(waits.values()) <= int(expected["lengths"].max())


def vision_model() -> PreTrainedModel:
    untied = "actor_rollout_ref.model.override_config={tie_word_embeddings: false}"
    path = f'actor_rollout_ref.model.path="{real_path(VISION)}"'
    config = compose("grpo", [path, untied, "actor_rollout_ref.model.init=random"]).config
    return load_model(config.actor_rollout_ref.model, "policy", torch.float32, 0)


@pytest.mark.parametrize("load", [partial(tiny_model, tie_word_embeddings=False), vision_model])
def test_recorded_steps_wait_for_nothing(load: Callable[[], PreTrainedModel]) -> None:
    prompts = experience().prompt_ids.select(torch.arange(0, ROWS, 2))
    params = sampling(max_tokens=6, stop_token_ids=())
    expected = HFEngine(load(), None).generate(prompts, params)
    with SecondDevice() as device:

        class Recorder:
            def capture(self, work: Callable[[], None]) -> Callable[[], None]:
                before = dict(device.syncs), dict(device.uploads)
                work()
                assert (device.syncs, device.uploads) == before
                return work

            def clear(self) -> None: ...

        model = load()
        torch.nn.Module.to(model, NAME)
        engine = HFEngine(model, None, steps=Steps(Recorder()))
        found = engine.generate(prompts.to(NAME), params)
        assert engine.static is not None
        assert len(engine.static) == 1
    assert torch.equal(found.response_ids.values, expected.response_ids.values)


def test_devices_do_not_mix() -> None:
    with SecondDevice() as device:
        x = torch.ones(3).to(NAME)
        assert float((x + torch.tensor(1.0)).sum()) == 6.0
        assert sum(device.syncs.values()) == 1
        with pytest.raises(DeviceError, match="add has tensors of both devices"):
            x + torch.ones(3)
